"""Sharded equals one device: loss, every gradient, then three steps of AdamW and of LAMB.

Every factorisation of eight devices over data, fsdp and tensor, with and without accumulation, for
three model shapes. Each factorisation meets each shape here once, with or without accumulation by
turns; the other half runs with `-m sweep`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from colossax.config import BatchConfig, Plan, Precision, Segment, preset
from colossax.models import GPT2Config, LlamaConfig, Qwen3Config, maker
from colossax.optim import adamw, lamb
from colossax.train import build_step, next_token_loss
from tests.oracle import assert_losses_close, assert_trees_close, factorisations
from tests.train.test_step import text_batch

SHAPES = {
    "llama": LlamaConfig(vocab=64, embed=32, layers=2, heads=8, kv_heads=4, mlp=48, max_seq=32),
    "gpt2": GPT2Config(vocab=64, embed=32, layers=2, heads=8, mlp=64, max_seq=32),
    "qwen3": Qwen3Config(
        vocab=64, embed=32, layers=2, heads=8, kv_heads=2, head_dim=8, mlp=40, max_seq=32
    ),
}
BATCH = text_batch(rows=16)
MESHES = factorisations(8, ("data", "fsdp", "tensor"))
PRESETS = ("zero3+megatron", "zero1+megatron_sp", "zero3+megatron_sp", "ddp+megatron")


STEPS = 3


def both_optimizers(dims):
    """AdamW for the first three steps, LAMB for the next three; remembers the last gradients.

    One program then runs both, which halves what this file spends in the compiler.
    """
    parts = (adamw(1e-2, eps=1e-5)(dims), lamb(1e-2)(dims))

    def init(params):
        states = tuple(part.init(params) for part in parts)
        return {
            "states": states,
            "count": jnp.int32(0),
            "grads": jax.tree.map(jnp.zeros_like, params),
        }

    def update(grads, state, params):
        def through(at):
            def branch():
                updates, new = parts[at].update(grads, state["states"][at], params)
                return updates, (*state["states"][:at], new, *state["states"][at + 1 :])

            return branch

        updates, states = jax.lax.cond(state["count"] < STEPS, through(0), through(1))
        return updates, {"states": states, "count": state["count"] + 1, "grads": grads}

    return optax.GradientTransformation(init, update)


def run(shape, plan, devices):
    """Gradients at the start, and losses of three steps per optimizer, both from the start."""
    step = build_step(
        maker(SHAPES[shape]), both_optimizers, next_token_loss(z_loss=1e-3), plan, devices=devices
    )
    params = step.init()["params"]
    params = jax.tree.map(_stirred, params, step.spec.infos, step.shardings["params"])
    state = step.init_from(params)

    @jax.jit
    def program(state, batch):
        start = state["params"]

        def body(state, at):
            params = jax.tree.map(lambda a, b: jnp.where(at == STEPS, a, b), start, state["params"])
            state, metrics = step.pure({**state, "params": params}, batch)
            return state, (metrics["loss"], state["opt_state"]["grads"])

        _, (losses, grads) = jax.lax.scan(body, state, jnp.arange(2 * STEPS))
        return jax.tree.map(lambda g: g[0], grads), losses

    grads, losses = jax.tree.map(np.asarray, program(state, step.place(BATCH)))
    assert losses[0] == losses[STEPS]
    return grads, {"adamw": losses[:STEPS], "lamb": losses[STEPS:]}


def _stirred(leaf, info, sharding):
    """Norms and biases away from one and zero, so that every path of the gradient matters.

    The noise of a layer does not depend on the segment that holds it.
    """
    own = info.shape[1:] if info.stacked else info.shape
    layers = range(info.first_layer, info.first_layer + info.layer_count) if info.stacked else [0]
    first = layers[0] if info.stacked else info.first_layer or 0
    noise = [
        np.random.default_rng((*info.path.encode(), first + at)).normal(size=own) * 0.05
        for at in range(len(layers))
    ]
    noise = np.stack(noise) if info.stacked else noise[0]
    return jax.device_put(np.asarray(leaf) + noise.astype(np.float32), sharding)


@functools.cache
def truth(shape):
    return run(shape, Plan(mesh={"fsdp": 1}), jax.devices()[:1])


def cases():
    for shape_at, shape in enumerate(SHAPES):
        for at, mesh in enumerate(MESHES):
            for pieces in (1, 2):
                plan = preset(
                    PRESETS[(at + shape_at) % len(PRESETS)],
                    mesh=mesh,
                    batch=BatchConfig(accumulation=pieces),
                )
                label = "-".join(f"{axis}{size}" for axis, size in mesh.items() if size > 1)
                later = (at + shape_at + pieces) % 2 == 0
                marks = [pytest.mark.sweep] if later else []
                yield pytest.param(shape, plan, id=f"{shape}-{label}-x{pieces}", marks=marks)


@pytest.mark.parametrize(("shape", "plan"), list(cases()))
def test_every_mesh_equals_one_device(devices, shape, plan, capfd):
    want_grads, want_losses = truth(shape)
    grads, losses = run(shape, plan, devices)
    assert_trees_close(grads, want_grads)
    for name in want_losses:
        assert_losses_close(losses[name], want_losses[name])
    assert "rematerialization" not in capfd.readouterr().err


@pytest.mark.parametrize("remat", ["full", "qkv+attention"])
def test_segments_and_remat_equal_one_device(devices, remat):
    plan = preset(
        "zero3+megatron_sp",
        mesh={"fsdp": 2, "tensor": 4},
        segments=(Segment(count=1), Segment(count=1, remat=remat)),
    )
    want_losses = truth("llama")[1]
    _, losses = run("llama", plan, devices)
    assert_losses_close(losses["adamw"], want_losses["adamw"])
    assert_losses_close(losses["lamb"], want_losses["lamb"])


def test_bf16_compute_is_within_its_rounding(devices):
    plan = preset(
        "zero3+megatron",
        mesh={"data": 2, "fsdp": 2, "tensor": 2},
        precision=Precision(compute="bfloat16"),
    )
    want_grads, want_losses = truth("llama")
    grads, losses = run("llama", plan, devices)
    assert_trees_close(grads, want_grads, tolerance=2e-2)
    assert_losses_close(losses["adamw"], want_losses["adamw"], tolerance=2e-2)
    assert not np.array_equal(losses["adamw"], want_losses["adamw"])


def test_three_steps_move_the_loss_far_more_than_the_tolerance():
    """The comparison above would be empty if the optimizers hardly moved."""
    for losses in truth("llama")[1].values():
        assert np.ptp(losses) > 1e-2
