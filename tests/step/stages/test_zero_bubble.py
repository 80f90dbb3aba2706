"""Stages whose backward passes are in two parts, or whose layers lie in a V, equal one device."""

import jax
import numpy as np
import optax
import pytest

from colossax.config import BatchConfig, Plan, Segment, preset
from colossax.planner import build_step
from tests.oracle import assert_losses_close, assert_trees_close
from tests.step.stages import test_stages as stages
from tests.step.stages.test_stages import FULL, devices_of, in_chunks, once, piped

QUICK = {
    "zb_h1, recomputed, around a ring": (
        "packed",
        preset(
            "zero3+ring+pipeline",
            mesh={"stage": 2, "ring": 2, "fsdp": 2},
            segments=FULL,
            **piped(3, schedule="zb_h1"),
        ),
    ),
    "zb_v": (
        "gpt2",
        Plan(mesh={"stage": 4, "tensor": 2}, segments=FULL, **piped(3, schedule="zb_v")),
    ),
}


@pytest.mark.catches("stage-weights-of-another-tick")
@pytest.mark.catches("stage-weights-stay")
@pytest.mark.parametrize(("model", "plan"), QUICK.values(), ids=QUICK)
def test_a_case_of_each_kind_equals_one_device(model, plan):
    stages.assert_equals_one_device(model, plan, rows=12)


def zb(mesh, count=4, schedule="zb_h1", remat="full", **more):
    segments = (Segment(remat=remat),)
    return Plan(mesh=mesh, segments=segments, **more, **piped(count, schedule=schedule))


FORMS = {
    "nothing recomputed": (zb({"stage": 4, "fsdp": 2}, remat="none"), 16),
    "dots": (zb({"stage": 2}, remat="dots"), 8),
    "names": (zb({"stage": 2, "tensor": 2}, remat="qkv+mlp"), 8),
    "fewer microbatches than stages": (zb({"stage": 4}, 2), 8),
    "one microbatch": (zb({"stage": 8}, 1), 8),
    "rows that nothing divides": (zb({"stage": 2, "fsdp": 2}, 3), 10),
    "microsteps": (zb({"stage": 2}, 3, batch=BatchConfig(accumulation=2)), 12),
    "2d": (zb({"stage": 2, "row": 2, "col": 2}, tensor_layout="2d"), 8),
    "cannon": (
        zb({"stage": 2, "row": 2, "col": 2}, tensor_layout="2d", tensor_matmul="cannon"),
        8,
    ),
    "3d": (zb({"stage": 2, "row": 2, "col": 2}, tensor_layout="3d"), 8),
    "overlap": (
        preset(
            "megatron_sp",
            mesh={"stage": 2, "tensor": 2},
            tensor_matmul="overlap",
            segments=FULL,
            **piped(2, schedule="zb_h1"),
        ),
        8,
    ),
    "zb_v, fewer microbatches than stages": (zb({"stage": 4}, 2, "zb_v"), 8),
    "zb_v, many": (zb({"stage": 4}, 9, "zb_v"), 18),
    "zb_v, names": (zb({"stage": 2, "fsdp": 2}, 4, "zb_v", remat="qkv+mlp"), 16),
    "gathered once": (
        preset(
            "zero3+megatron_sp+pipeline",
            mesh={"stage": 2, "fsdp": 2, "tensor": 2},
            segments=FULL,
            **piped(3, gather="step", schedule="zb_v"),
        ),
        12,
    ),
    "gathered and reduced once": (
        Plan(mesh={"stage": 2, "fsdp": 2}, segments=FULL, **once(3, schedule="zb_h1")),
        12,
    ),
    "zb_v, gathered and reduced once": (
        Plan(
            mesh={"stage": 4, "fsdp": 2},
            segments=(Segment(remat="qkv+mlp"),),
            **once(5, schedule="zb_v"),
        ),
        20,
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize(("plan", "rows"), FORMS.values(), ids=FORMS)
def test_every_form_equals_one_device(plan, rows):
    stages.assert_equals_one_device("llama", plan, rows=rows)


@pytest.mark.sweep
@pytest.mark.parametrize("schedule", ["zb_h1", "zb_v"])
@pytest.mark.parametrize("model", ["gpt2", "bloom", "packed", "mistral"])
def test_every_model_equals_one_device(model, schedule):
    plan = zb({"stage": 2, "ring": 2}, 2, schedule)
    stages.assert_equals_one_device(model, plan)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zb_h1", "zb_v"])
def test_three_steps_evaluation_and_a_state_of_another_mesh(tmp_path, schedule):
    plan = zb({"stage": 2, "tensor": 2}, 2, schedule)
    stages.assert_goes_on_as_one_device(plan, tmp_path)


@pytest.mark.catches("stage-parts-in-order")
@pytest.mark.parametrize("schedule", ["zb_h1", "zb_v"])
def test_what_layers_count_is_in_the_loss_and_its_gradients(schedule):
    x = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    plan = Plan(mesh={"stage": 2, "data": 2}, **piped(4, schedule=schedule))
    found = []
    for each in (Plan(), plan):
        step = build_step(
            stages.Stacked,
            optax.sgd(1.0),
            stages.counted_loss,
            each,
            devices=devices_of(each),
            batch_dims={"x": ("batch", "embed")},
        )
        state = step.init(0)
        got = jax.jit(step.gradients)(state, step.place({"x": x}))
        found.append(jax.tree.map(np.asarray, (got.grads, got.loss, got.sums)))
    (grads, loss, sums), (piped_grads, piped_loss, piped_sums) = found
    assert_trees_close(piped_grads, in_chunks(grads, plan.pipeline.chunks_of_stage))
    assert_losses_close(piped_loss, loss)
    np.testing.assert_allclose(piped_sums["load"][0], sums["load"][0], rtol=1e-5)
