"""Stages compiled for GPUs that are not there: memory, bytes on each axis, flat in microbatches."""

import dataclasses
import functools

import pytest

from colossax.aot import parse_target
from colossax.config import BatchConfig, PipelineConfig
from colossax.planner import inspect_run
from colossax.recipes import recipe

pytestmark = pytest.mark.aot

GIB, GB = 2**30, 1e9
STAGES = 4
ROW_BYTES = 8192 * 4096 * 2  # a microbatch between two stages, bfloat16


@functools.cache
def inspected(microbatches, layers=32, stages=STAGES, gather="microbatch", once=False):
    """Llama 3 8B, rows of 8192, full recomputation, one row of each device in a microbatch."""
    config = recipe("llama3_8b")
    plan = config.plan.replace(
        mesh={"stage": stages, "fsdp": 8 // stages},
        batch=BatchConfig(reduce_once=once),
        pipeline=PipelineConfig(microbatches=microbatches, gather=gather),
    )
    data = dataclasses.replace(config.data, global_batch=microbatches * 8 // stages)
    model = dataclasses.replace(config.model, layers=layers)
    return inspect_run(config.replace(plan=plan, data=data, model=model), parse_target("h100:1x8"))


def sent(one, axis, *kinds):
    return sum(
        link.totals.ring_bytes
        for link in one.links
        if link.totals.axis == axis and (not kinds or link.totals.kind in kinds)
    )


@pytest.mark.catches("stage-kept-in-two-layouts")
def test_llama_3_8b_on_four_stages():
    one = inspected(8)
    assert one.memory.argument_bytes <= 11.4 * GIB
    assert one.memory.temp_bytes <= 9.2 * GIB
    assert sum(link.totals.ring_bytes for link in one.links) <= 66 * GB
    assert one.pipeline is not None
    found = one.pipeline.to_json(one.memory.total_bytes)
    assert found["stages"][1]["layers"] == [[8, 15]]
    assert found["pipeline"]["executed"] == {"forward": 8 + 3, "backward": 8 + 3}


@pytest.mark.catches("stage-rows-scattered")
def test_weights_gathered_once_a_step():
    one = inspected(8, gather="step")
    assert one.memory.temp_bytes <= 12.5 * GIB
    assert sum(link.totals.ring_bytes for link in one.links) <= 29.3 * GB


@pytest.mark.catches("stage-gathered-for-each-microbatch")
def test_gradients_reduced_once_a_step():
    one = inspected(8, gather="step", once=True)
    assert one.memory.temp_bytes <= 16.8 * GIB
    assert sum(link.totals.ring_bytes for link in one.links) <= 11.6 * GB
    # A stage's weights in bfloat16, and gradients in float32: of each device the other half.
    stage = 8.03e9 / STAGES
    assert sent(one, "fsdp", "all-gather") == pytest.approx(2 * stage / 2, rel=1e-3)
    assert sent(one, "fsdp", "reduce-scatter") == pytest.approx(4 * stage / 2, rel=1e-3)
    assert sent(one, "fsdp", "all-to-all", "all-reduce") < 1e4


@pytest.mark.catches("stage-looks-up-in-vain")
def test_llama_3_8b_on_eight_stages():
    one = inspected(8, stages=8)
    assert one.memory.argument_bytes + one.memory.temp_bytes <= 21.5 * GIB
    assert sum(link.totals.ring_bytes for link in one.links) <= 6.7 * GB


def test_memory_and_program_do_not_grow_with_microbatches():
    few, many = inspected(8, layers=4), inspected(64, layers=4)
    assert many.memory.temp_bytes <= 1.02 * few.memory.temp_bytes
    assert len(many.program.hlo) <= 1.02 * len(few.program.hlo)


@pytest.mark.parametrize("microbatches", [8, 64])
def test_between_stages_activations_go_and_nothing_is_gathered(microbatches):
    one = inspected(microbatches, layers=4)
    # Forward and backward, a message of the microbatch in each tick that needs one.
    ticks = microbatches + STAGES - 1
    assert sent(one, "stage", "collective-permute") == 2 * ticks * ROW_BYTES
    assert not sent(one, "stage", "all-gather", "reduce-scatter", "all-to-all")
