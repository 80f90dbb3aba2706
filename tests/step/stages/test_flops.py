"""What a device executes beyond what is useful, counted in the compiled program."""

import functools
import math

import jax
import pytest

from colossax.config import Plan
from tests.aot.executed import executed_flops
from tests.step import test_parallel_oracle as oracle
from tests.step.stages.test_stages import FULL, MODELS, devices_of, piped, step_of

STAGES, MICROBATCHES = 4, 8


@functools.cache
def executed(schedule, chunks=1):
    """Of one device, all layers recomputed; `schedule` None: of one device alone."""
    plan = Plan(segments=FULL)
    if schedule is not None:
        how = piped(MICROBATCHES, schedule=schedule, chunks=chunks)
        plan = Plan(mesh={"stage": STAGES}, segments=FULL, **how)
    step = step_of("llama", plan, devices_of(plan))
    rows = oracle.batch("llama", rows=MICROBATCHES).items()
    batch = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in rows}
    return executed_flops(step.lower(step.abstract, step.abstract_batch(batch)).compile().as_text())


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb_h1", 1), ("zb_v", 2)],
)
def test_a_device_executes_no_more_than_the_bubble_says(schedule, chunks):
    useful, turns = executed(None) / STAGES, MICROBATCHES * chunks
    if schedule == "zb_v":  # its half stages fill and empty as whole ones do
        turns = MICROBATCHES
    assert useful < executed(schedule, chunks) <= useful * (turns + STAGES - 1) / turns


@pytest.mark.catches("stage-weights-in-vain")
@pytest.mark.parametrize(("schedule", "chunks"), [("zb_h1", 1), ("zb_v", 2)])
def test_no_weight_gradient_runs_on_zeros(schedule, chunks):
    step = step_of("llama", Plan(), oracle.ONE)
    matrices = [x for x in jax.tree.leaves(step.spec.infos) if x.segment is not None]
    weights = sum(math.prod(x.shape) for x in matrices if len(x.shape) > 2)
    tokens = oracle.batch("llama", rows=1)["tokens"].size
    each = 2 * tokens * weights // STAGES
    assert MODELS["llama"].layers % (2 * STAGES) == 0
    assert executed("1f1b") - executed(schedule, chunks) == (STAGES - 1) * each
