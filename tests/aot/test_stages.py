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
STAGES, FSDP = 4, 2
ROW_BYTES = 8192 * 4096 * 2  # a microbatch between two stages, bfloat16


@functools.cache
def inspected(microbatches, layers=32):
    """Llama 3 8B, rows of 8192, full recomputation, one row of each device in a microbatch."""
    config = recipe("llama3_8b")
    plan = config.plan.replace(
        mesh={"stage": STAGES, "fsdp": FSDP},
        batch=BatchConfig(),
        pipeline=PipelineConfig(microbatches=microbatches),
    )
    data = dataclasses.replace(config.data, global_batch=microbatches * FSDP)
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
    assert one.memory.temp_bytes <= 10.0 * GIB
    assert sum(link.totals.ring_bytes for link in one.links) <= 67 * GB
    assert one.pipeline is not None
    found = one.pipeline.to_json(one.memory.total_bytes)
    assert found["stages"][1]["layers"] == [[8, 15]]
    assert found["pipeline"]["executed"] == {"forward": 8 + 3, "backward": 8 + 3}


@pytest.mark.catches("stage-slot-too-many")
def test_memory_has_as_many_inputs_as_the_simulator_keeps():
    """By two depths: what both need is left out, and gradients are known."""
    few, more = inspected(8, layers=8), inspected(8, layers=16)
    assert more.pipeline is not None
    gradients = 4 * (more.parameters - few.parameters) / (STAGES * FSDP)
    added = more.memory.temp_bytes - few.memory.temp_bytes - gradients
    slots = added / (2 * ROW_BYTES)  # two layers more on each stage
    # One lies in no slot: that of the tick itself.
    assert slots - 1 == pytest.approx(max(more.pipeline.report.saved), rel=0.05)


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
