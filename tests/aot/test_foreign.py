"""Plain Flax modules with names of dims send and hold what our own operations do."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from colossax.aot import collectives, compile_program, parse_target, target_devices
from colossax.config import AttentionConfig, Plan
from colossax.pallas.target import target
from colossax.planner import build_step
from colossax.sharding import compiler_options, param_sharding
from tests import gemma, side_by_side
from tests.nn.plain import UNet, ViT
from tests.nn.plain_families import FAMILIES, HAND, LONGEST, next_token

# Of 24 layers two programs are traced and compiled, 175 CPU-seconds.
pytestmark = [pytest.mark.aot, pytest.mark.timeout(1500)]

MIXED, FSDP = {"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 8}
SENT, HELD = 1.1, 1.15


def counted(mesh, *, own, layers, remat):
    """Bytes that a step of 64 rows sends in rings, and holds, per device."""
    make_model = side_by_side.maker(own=own, layers=layers, remat=remat)
    program, step = compiled(
        make_model, side_by_side.loss, side_by_side.batch(64), mesh, side_by_side.DIMS
    )
    return sent_by(program, step), program.device_bytes


def compiled(make_model, loss, batch, mesh, batch_dims, dims=None):
    """The program of a step on eight GPUs, and the step."""
    with target("gpu", compute_capability=(9, 0)):
        step = build_step(
            make_model,
            optax.adamw(1e-3),
            loss,
            Plan(mesh=mesh, attention=AttentionConfig(kernel="xla")),
            devices=target_devices(parse_target("h100:1x8")),
            batch_dims=batch_dims,
            dims=dims,
        )
        shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()}
        lowered = step.lower(step.abstract, step.abstract_batch(shapes))
    return compile_program(lowered, options=compiler_options(step.bound)), step


def sent_by(program, step):
    """Bytes that each device sends in rings."""
    return sum(one.ring_bytes for one in collectives(program.hlo, step.bound.mesh))


@pytest.mark.parametrize(
    "layers, remat",
    [(2, False), pytest.param(12, True, marks=pytest.mark.slow)],
    ids=["kept", "24-under-remat"],
)
@pytest.mark.parametrize("mesh", [MIXED, FSDP], ids=["mixed", "fsdp"])
def test_a_plain_model_sends_and_holds_what_our_operations_do(mesh, layers, remat):
    """Of an encoder-decoder with as many layers in each."""
    ours, plain = (counted(mesh, own=own, layers=layers, remat=remat) for own in (True, False))
    assert plain[0] <= SENT * ours[0]
    assert plain[1] <= HELD * ours[1]


def squares(model, batch):
    return jnp.mean(jnp.square(model(batch["x"]) - 0.5))


def images(rows, size):
    return {"x": np.zeros((rows, size, size, 3), np.float32)}


IMAGES = {"x": ("batch", None, None, None)}


def vit():
    return lambda rngs: ViT(rngs, width=256), squares, images(64, 16), IMAGES


def unet():
    return lambda rngs: UNet(rngs, width=128), squares, images(16, 32), IMAGES


def flax_gemma():
    sizes = {"embed_dim": 256, "hidden_dim": 1024, "head_dim": 32, "sliding_window_size": 32}
    heads = {"num_heads": 8, "num_kv_heads": 8, "num_embed": 512}
    make_model = gemma.maker(layers=2, **sizes, **heads)
    return make_model, gemma.loss, gemma.batch(64, 64, vocab=512), None


MODELS = {"vit": vit, "unet": unet, "gemma": flax_gemma}


@pytest.mark.parametrize("model", MODELS)
def test_untouched_models_send_and_hold_no_more_than_they_have_to(model):
    """No operations of ours make such models up, so the measure is what zero3 cannot do without.

    Each weight is gathered once (our operations gather it twice) and each gradient scattered. Of
    memory it holds what a device holds that has all whole, but for the share of AdamW's two moments
    that lives elsewhere: weights are kept from forward to backward.
    """
    make_model, loss, batch, dims = MODELS[model]()
    (split, step), (whole, _) = (
        compiled(make_model, loss, batch, mesh, dims) for mesh in (FSDP, {"data": 8})
    )
    infos = jax.tree.leaves(step.spec.infos)
    weights = sum(4 * math.prod(info.shape) for info in infos)
    assert sent_by(split, step) <= SENT * 2 * 7 / 8 * weights
    assert split.device_bytes <= HELD * (whole.device_bytes - 2 * 7 / 8 * weights)


def parts_over_tensor(step, info):
    """Into how many parts the tensor axis splits it."""
    return math.prod(
        step.bound.mesh.shape["tensor"]
        for entry in param_sharding(step.bound, "weights", info).spec
        if entry is not None and "tensor" in ((entry,) if isinstance(entry, str) else entry)
    )


@pytest.mark.parametrize("model", MODELS)
def test_weights_and_gradients_of_untouched_models_send_on_a_mixed_mesh_what_ours_do(model):
    """All that leaves the tensor axis alone.

    Our operations gather a weight of n bytes in two halves twice, and reduce its gradient in two
    and the halves between two again: 2 n. Here the gather comes once, and one sum of four, 2 n too.
    """
    make_model, loss, batch, dims = MODELS[model]()
    program, step = compiled(make_model, loss, batch, MIXED, dims)
    found = collectives(program.hlo, step.bound.mesh)
    sent = sum(one.ring_bytes for one in found if "tensor" not in one.axes)
    infos = jax.tree.leaves(step.spec.infos)
    ours = sum(2 * 4 * math.prod(i.shape) / parts_over_tensor(step, i) for i in infos)
    assert 0.5 * ours < sent <= SENT * ours


@pytest.mark.parametrize("family", FAMILIES)
def test_collectives_of_published_trees_are_those_of_a_plan_by_hand(family):
    """Each exchange, over the same axes, of as many bytes, and every axis exchanges something."""
    found, by_hand = (exchanges(FAMILIES[family], MIXED, dims) for dims in (None, HAND[family]))
    assert found == by_hand
    assert {axis for one in found for axis in one[1]} == set(MIXED)


def exchanges(make_model, mesh, dims):
    """Kind, axes and bytes of each, sorted."""
    rows = {"tokens": np.zeros((16, LONGEST + 1), np.int32)}
    program, step = compiled(make_model, next_token, rows, mesh, None, dims)
    found = collectives(program.hlo, step.bound.mesh)
    return sorted((one.kind, tuple(sorted(one.axes)), one.ring_bytes) for one in found)
