"""Several policies of rematerialisation in a stage: the same ones, in turn, on every stage."""

import jax
import numpy as np
import pytest

from colossax.config import OffloadConfig, Plan, Segment, preset
from colossax.errors import PlanError
from colossax.optim import sgd
from tests.oracle import assert_losses_close, assert_trees_close
from tests.step import test_parallel_oracle as oracle
from tests.step.stages.test_stages import (
    FULL,
    assert_equals_one_device,
    devices_of,
    once,
    piped,
    start,
    step_of,
    truth,
)

HALVES = (Segment(count=2, remat="full"), Segment(count=2, remat="qkv+mlp"))
"""Of four layers of a stage."""


@pytest.mark.catches("stage-policy-of-the-first-layers")
def test_two_policies_in_each_stage_equal_one_device():
    plan = Plan(mesh={"stage": 2, "fsdp": 2}, segments=HALVES, **piped(2))
    assert_equals_one_device("llama", plan, rows=8)


THIRDS = (Segment(count=1, remat="none"), Segment(count=1, remat="full"))
CASES = {
    "in chunks": Plan(mesh={"stage": 2, "tensor": 2}, segments=THIRDS, **piped(4, chunks=2)),
    "four stages around a ring": preset(
        "zero3+ring", mesh={"stage": 4, "ring": 2}, segments=THIRDS, **piped(4)
    ),
    "reduced once, in chunks": Plan(
        mesh={"stage": 2, "fsdp": 2, "tensor": 2}, segments=THIRDS, **once(3, chunks=2)
    ),
    "as many stages as there are": Plan(
        mesh={"stage": -1}, segments=(Segment(count=1), Segment(count=1, remat="dots")), **piped(2)
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", CASES)
def test_policies_of_a_stage_equal_one_device_on_every_mesh(name):
    plan = CASES[name]
    if plan.mesh["stage"] == -1:
        step = step_of("llama", plan, jax.devices()[:4])
        assert step.bound.mesh.shape["stage"] == 4
        return
    assert_equals_one_device("llama", plan)


@pytest.mark.sweep
def test_two_policies_in_each_stage_with_all_in_host_memory():
    offload = OffloadConfig(parameters=1.0, optimizer=1.0, activations=1.0)
    plan = Plan(mesh={"stage": 2, "data": 2}, segments=HALVES, offload=offload, **piped(4))
    step = step_of("llama", plan, devices_of(plan), sgd(1.0))
    state = step.init_from(jax.device_put(start("llama"), step.shardings["params"]))
    found = jax.jit(step.gradients)(state, step.place(oracle.batch("llama", rows=16)))
    want, right = truth("llama", 16)
    assert_trees_close(jax.tree.map(np.asarray, found.grads), want)
    assert_losses_close(found.loss, right)


@pytest.mark.sweep
@pytest.mark.catches("stage-one-policy-for-all")
def test_what_is_kept_lies_between_that_of_either_policy():
    temps = []
    for segments in (HALVES[:1], HALVES, HALVES[1:]):
        one = (Segment(remat=segments[0].remat),) if len(segments) == 1 else segments
        plan = Plan(mesh={"stage": 2}, segments=one, **piped(4))
        step = step_of("llama", plan, devices_of(plan))
        batch = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype)
            for name, x in oracle.batch("llama", rows=16).items()
        }
        compiled = step.lower(step.abstract, step.abstract_batch(batch)).compile()
        temps.append(compiled.memory_analysis().temp_size_in_bytes)
    full, half, names = temps
    assert full < half < names
    np.testing.assert_allclose(half, (full + names) / 2, rtol=0.15)


REFUSED = {
    "not of a stage": ((3, 2), "counts \\(3, 2\\) do not cover 8 layers"),
    "of another number of stages": ((1, 1), "counts \\(1, 1\\) do not cover 8 layers"),
}


@pytest.mark.parametrize(("counts", "message"), REFUSED.values(), ids=REFUSED)
def test_counts_are_of_the_model_or_of_each_stage(counts, message):
    segments = tuple(Segment(count=count) for count in counts)
    plan = Plan(mesh={"stage": 2}, segments=segments, **piped(2))
    with pytest.raises(PlanError, match=message):
        step_of("llama", plan, devices_of(plan))


UNSHARED = {
    "two alike": (
        2,
        (Segment(count=4),) * 2,
        "has runs of \\(4, 4\\) layers, .* of plan.pipeline.chunks 1;",
    ),
    "of another number of stages": (-1, THIRDS, "counts \\(1, 1\\) are 2 layers, .* stages has 4;"),
    "uneven": (2, (Segment(count=3), *FULL), "segments: .* of 3 layers, which 2 stages cannot"),
}


@pytest.mark.catches("stage-runs-beyond-chunks")
@pytest.mark.catches("stage-counts-of-other-stages")
@pytest.mark.parametrize(("stages", "segments", "message"), UNSHARED.values(), ids=UNSHARED)
def test_segments_of_which_stages_would_leave_layers_out_are_refused(stages, segments, message):
    plan = Plan(mesh={"stage": stages}, segments=segments, **piped(2))
    with pytest.raises(PlanError, match=message):
        step = step_of("llama", plan, jax.devices()[:2])
        jax.eval_shape(step.gradients, step.abstract, oracle.batch("llama", rows=4))


@pytest.mark.catches("stage-layers-in-two-memories")
def test_all_layers_of_a_stage_are_in_the_same_memory():
    segments = (Segment(count=2, offload="optimizer"), Segment(count=2))
    plan = Plan(mesh={"stage": 2}, segments=segments, **piped(2))
    with pytest.raises(PlanError, match="give them one offload"):
        step_of("llama", plan, devices_of(plan))
