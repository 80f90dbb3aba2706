"""Whole models in every tensor layout equal one device: the loss and every gradient."""

import functools
import itertools

import jax
import numpy as np
import optax
import pytest

from colossax.config import BatchConfig, LossConfig, Plan, Segment, preset
from colossax.models import GPT2Config, LlamaConfig, Qwen3Config, maker
from colossax.planner import build_step
from colossax.tasks import next_token_loss
from tests.fresh import fresh_state
from tests.oracle import assert_losses_close, assert_trees_close
from tests.sharding.matmul.layouts import flat, sequence_parallel
from tests.step.test_step import text_batch

SHAPES = {
    "llama": LlamaConfig(vocab=64, embed=32, layers=2, heads=8, kv_heads=4, mlp=48, max_seq=32),
    "gpt2": GPT2Config(vocab=64, embed=32, layers=2, heads=8, mlp=64, max_seq=32),
    "qwen3": Qwen3Config(
        vocab=64, embed=32, layers=2, heads=8, kv_heads=2, head_dim=8, mlp=48, max_seq=32
    ),
}
PLANS = {
    "2d-2x4": flat("2d", row=2, col=4),
    "2d-fsdp2": flat("2d", fsdp=2, row=2, col=2),
    "2.5d-2x2x2": flat("2.5d", depth=2, row=2, col=2),
    "cannon-2x2x2": flat("2.5d", "cannon", depth=2, row=2, col=2),
    "3d-2x2x2": flat("3d", depth=2, row=2, col=2),
    "3d-1x2x4": flat("3d", row=2, col=4),
    "overlap-4": sequence_parallel({"tensor": 4, "fsdp": 2}),
}


def loss_and_gradients(shape, plan, devices):
    """Of a model whose norms and biases are away from one and zero, so that all paths matter."""
    step = build_step(
        maker(SHAPES[shape]), optax.sgd(1.0), next_token_loss(z_loss=1e-3), plan, devices=devices
    )
    start = fresh_state(SHAPES[shape], step)["params"]
    params = jax.tree.map(_stirred, start, step.shardings["params"])
    found = jax.jit(step.gradients)(step.init_from(params), step.place(text_batch()))
    return found.loss, found.grads


def _stirred(leaf, sharding):
    noise = np.random.default_rng(leaf.shape).normal(size=leaf.shape) * 0.05
    return jax.device_put(np.asarray(leaf) + noise.astype(np.float32), sharding)


@functools.cache
def truth(shape):
    return loss_and_gradients(shape, Plan(mesh={"fsdp": 1}), jax.devices()[:1])


def assert_equals_one_device(shape, plan, devices):
    loss, grads = loss_and_gradients(shape, plan, devices)
    assert_losses_close(loss, truth(shape)[0])
    assert_trees_close(grads, truth(shape)[1])


def grid(columns, chosen):
    """Every pair of a plan and one of the columns; those not chosen run with `-m sweep`."""
    for plan in PLANS:
        for one in columns:
            marks = [] if (plan, one) in chosen else [pytest.mark.sweep]
            yield pytest.param(plan, one, id=f"{plan}-{one}", marks=marks)


QUICK = {
    *zip(PLANS, itertools.cycle(("llama", "gpt2")), strict=False),
    ("2d-2x4", "qwen3"),  # fewer kv heads than columns
}


@pytest.mark.parametrize(("plan", "shape"), list(grid(SHAPES, QUICK)))
def test_models_equal_one_device(devices, plan, shape, capfd):
    assert_equals_one_device(shape, PLANS[plan], devices)
    assert "rematerialization" not in capfd.readouterr().err


REMATS = ("full", "dots", "qkv+attention")
QUICK_REMATS = {("2d-2x4", "full"), ("3d-2x2x2", "dots"), ("overlap-4", "qkv+attention")}


@pytest.mark.parametrize(("plan", "remat"), list(grid(REMATS, QUICK_REMATS)))
def test_recomputed_layers_equal_one_device(devices, plan, remat):
    plan = PLANS[plan].replace(segments=(Segment(remat=remat),), loss=LossConfig(vocab_chunks=2))
    assert_equals_one_device("llama", plan, devices)


def test_regions_stand_under_vmap_where_gradients_are_reduced_once(devices):
    plan = preset(
        "zero1+megatron_sp",
        mesh={"fsdp": 2, "tensor": 4},
        tensor_matmul="overlap",
        batch=BatchConfig(accumulation=2),
    )
    assert plan.batch.reduce_once
    assert_equals_one_device("llama", plan, devices)


def test_microbatches_in_two_dimensions(devices):
    plan = PLANS["2.5d-2x2x2"].replace(batch=BatchConfig(accumulation=2))
    assert_equals_one_device("llama", plan, devices)
