"""Sharded equals one device: loss, every gradient, then three steps of AdamW and of LAMB.

Every factorisation of eight devices over data, fsdp and tensor, with and without accumulation, for
three model shapes. Each factorisation meets each shape here once, with or without accumulation by
turns; the other half runs with `-m sweep`.
"""

import functools

import jax
import numpy as np
import optax
import pytest

from colossax.config import BatchConfig, Plan, Precision, Segment, preset
from colossax.models import GPT2Config, LlamaConfig, Qwen3Config, maker
from colossax.optim import lamb
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
# Unlike all-zero or all-one initial norms and biases, these reach every path of the gradient.
BATCH = text_batch(rows=16)
MESHES = factorisations(8, ("data", "fsdp", "tensor"))
PRESETS = ("zero3+megatron", "zero1+megatron_sp", "zero3+megatron_sp", "ddp+megatron")


def optimizers():
    return {"adamw": optax.adamw(1e-2, eps=1e-5), "lamb": lamb(1e-2)}


def run(shape, plan, devices):
    """Loss and gradients at the start, losses of three steps per optimizer, in one program."""
    make = maker(SHAPES[shape])
    steps = {
        name: build_step(make, tx, next_token_loss(z_loss=1e-3), plan, devices=devices, clip_norm=1.0)
        for name, tx in optimizers().items()
    }
    first = next(iter(steps.values()))
    params = first.init()["params"]
    params = jax.tree.map(_stirred, params, first.shardings["params"])
    states = {name: step.init_from(params) for name, step in steps.items()}

    @jax.jit
    def program(states, batch):
        grads, _, _, loss = first.gradients(states["adamw"], batch)
        losses = {}
        for name, step in steps.items():
            _, metrics = jax.lax.scan(
                lambda state, _, step=step: step.pure(state, batch), states[name], None, length=3
            )
            losses[name] = metrics["loss"]
        return grads, loss, losses

    return jax.tree.map(np.asarray, program(states, first.place(BATCH)))


def _stirred(leaf, sharding):
    noise = np.random.default_rng(leaf.size).normal(size=leaf.shape) * 0.05
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


@pytest.mark.parametrize(("shape", "plan"), cases())
def test_every_mesh_equals_one_device(devices, shape, plan, capfd):
    want_grads, want_loss, want_losses = truth(shape)
    grads, loss, losses = run(shape, plan, devices)
    assert_losses_close(loss, want_loss)
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
    want_loss, want_losses = truth("llama")[1:]
    _, loss, losses = run("llama", plan, devices)
    assert_losses_close(loss, want_loss)
    assert_losses_close(losses["adamw"], want_losses["adamw"])
    assert_losses_close(losses["lamb"], want_losses["lamb"])


def test_bf16_compute_is_within_its_rounding(devices):
    plan = preset(
        "zero3+megatron",
        mesh={"data": 2, "fsdp": 2, "tensor": 2},
        precision=Precision(compute="bfloat16"),
    )
    want_grads, want_loss, want_losses = truth("llama")
    grads, loss, losses = run("llama", plan, devices)
    assert_losses_close(loss, want_loss, tolerance=2e-2)
    assert_trees_close(grads, want_grads, tolerance=2e-2)
    assert_losses_close(losses["adamw"], want_losses["adamw"], tolerance=2e-2)
    assert not np.array_equal(losses["adamw"], want_losses["adamw"])


def test_three_steps_move_the_loss_far_more_than_the_tolerance():
    """The comparison above would be empty if the optimizers hardly moved."""
    for losses in truth("llama")[2].values():
        assert np.ptp(losses) > 1e-2
