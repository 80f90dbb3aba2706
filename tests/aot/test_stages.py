"""Stages compiled for GPUs that are not there: memory, bytes on each axis, flat in microbatches."""

import dataclasses
import functools
import re

import numpy as np
import pytest

from colossax.aot import (
    full_stack_copies,
    host_compute,
    parse_module,
    parse_target,
    sync_transfers_in_loops,
)
from colossax.config import BatchConfig, OffloadConfig, PipelineConfig
from colossax.pipeline import schedule
from colossax.pipeline.routes import routes_of
from colossax.planner import inspect_run
from colossax.recipes import recipe
from tests.aot.executed import executed_flops

pytestmark = [pytest.mark.aot, pytest.mark.timeout(900)]

GIB, GB = 2**30, 1e9
STAGES, FSDP = 4, 2
ROW_BYTES = 8192 * 4096 * 2  # a microbatch between two stages, bfloat16


@functools.cache
def inspected(microbatches, layers=32, stages=STAGES, offload="none", once=False, **how):
    """Llama 3 8B, rows of 8192, full recomputation, one row of each device in a microbatch."""
    return _inspected(
        microbatches * 8 // stages,
        layers,
        mesh={"stage": stages, "fsdp": 8 // stages},
        batch=BatchConfig(reduce_once=once),
        pipeline=PipelineConfig(microbatches=microbatches, **how),
        offload=OffloadConfig().with_text(offload),
    )


def _inspected(rows, layers, **plan):
    config = recipe("llama3_8b")
    plan = config.plan.replace(**plan)
    data = dataclasses.replace(config.data, global_batch=rows)
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
    assert one.memory.temp_bytes <= 9.1 * GIB
    assert sum(link.totals.ring_bytes for link in one.links) <= 64.2 * GB
    assert one.pipeline is not None
    found = one.pipeline.to_json(one.memory.total_bytes)
    assert found["stages"][1]["layers"] == [[8, 15]]
    assert found["pipeline"]["executed"] == {"forward": 8 + 3, "backward": 8 + 3}


def test_weights_gathered_once_a_step():
    one = inspected(8, gather="step")
    assert one.memory.temp_bytes <= 12.5 * GIB
    assert sum(link.totals.ring_bytes for link in one.links) <= 27.6 * GB


@pytest.mark.catches("stage-gathered-for-each-microbatch")
@pytest.mark.catches("stage-rows-scattered")
def test_gradients_reduced_once_a_step():
    one = inspected(8, gather="step", once=True)
    assert one.memory.temp_bytes <= 16.8 * GIB
    assert sum(link.totals.ring_bytes for link in one.links) <= 10.4 * GB
    # A stage's weights in bfloat16, and gradients in float32: of each device the other half.
    stage = 8.03e9 / STAGES
    assert sent(one, "fsdp", "all-gather") == pytest.approx(2 * stage / 2, rel=1e-3)
    assert sent(one, "fsdp", "reduce-scatter") == pytest.approx(4 * stage / 2, rel=1e-3)
    assert sent(one, "fsdp", "all-to-all", "all-reduce") < 1e4


@pytest.mark.catches("stage-looks-up-in-vain")
@pytest.mark.catches("stages-alone-sum")
def test_llama_3_8b_on_eight_stages():
    one = inspected(8, stages=8)
    assert one.memory.argument_bytes + one.memory.temp_bytes <= 20.6 * GIB
    assert sum(link.totals.ring_bytes for link in one.links) <= 4.5 * GB


@pytest.mark.catches("stage-slot-too-many")
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2)])
def test_memory_has_as_many_inputs_as_the_simulator_says(schedule, chunks):
    """By two depths: what both need is left out, and gradients are known."""
    # Deep enough for layers, and not the head, to make the peak.
    how = {"schedule": schedule, "chunks": chunks}
    few, more = inspected(8, layers=16, **how), inspected(8, layers=32, **how)
    assert more.pipeline is not None
    gradients = 4 * (more.parameters - few.parameters) / (STAGES * FSDP)
    added = more.memory.temp_bytes - few.memory.temp_bytes - gradients
    slots = added / (4 // chunks * ROW_BYTES)  # so many layers more in each chunk of a stage
    assert slots == pytest.approx(more.pipeline.report.slots, rel=0.05)


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zb_h1", 1), ("zb_v", 2)]
)
def test_memory_and_program_do_not_grow_with_microbatches(schedule, chunks):
    how = {"layers": 4 * chunks, "schedule": schedule, "chunks": chunks}
    few, filled, many = (inspected(count, **how) for count in (8, 16, 64))
    assert many.memory.temp_bytes <= 1.02 * few.memory.temp_bytes
    # With so few that no phase repeats, the program of several chunks is shorter by one.
    assert len(many.program.hlo) <= 1.001 * len(filled.program.hlo)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("microbatches", [8, 64])
def test_between_stages_activations_go_and_nothing_is_gathered(microbatches, schedule):
    one = inspected(microbatches, 4, schedule=schedule)
    # Forward and backward, a message of the microbatch in each tick that needs one.
    ticks = microbatches + STAGES - 1
    assert sent(one, "stage", "collective-permute") == 2 * ticks * ROW_BYTES
    # Looked up rows and the parts of the last gradient, of each microbatch; no weights.
    rows = microbatches * ROW_BYTES * (STAGES - 1) / STAGES
    assert sent(one, "stage", "all-gather") == 2 * rows
    assert sent(one, "stage", "all-to-all") == rows
    assert not sent(one, "stage", "reduce-scatter")


@pytest.mark.catches("stage-kept-copied")
def test_in_a_v_both_ways_are_sent_and_weights_of_the_way_back_once():
    one = inspected(8, 8, schedule="zb_v", chunks=2)
    ticks = 2 * (8 + STAGES - 1)
    layer = (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336 + 2 * 4096) * 4 // FSDP
    found = sent(one, "stage", "collective-permute") - 2 * layer
    # What nobody reads at an end is not sent.
    assert 0.9 * 4 * ticks * ROW_BYTES < found <= 4 * ticks * ROW_BYTES
    kept = rf"= bf16\[{4 * STAGES - 1},1,1,1,8192,4096\]\S* "
    assert re.search(kept, one.program.hlo) and not re.search(kept + r"copy\(", one.program.hlo)
    # Chunks take turns at the first layer: rows are looked up in every tick that goes forward. The
    # last gradient is taken apart and put together for each microbatch.
    routes = routes_of(schedule("zb_v", STAGES, 8, 2))
    looked_up = np.count_nonzero(routes.forward.active.any(axis=1))
    rows = ROW_BYTES * (STAGES - 1) / STAGES
    assert sent(one, "stage", "all-gather", "all-to-all") == (looked_up + 2 * 8) * rows
    assert not sent(one, "stage", "reduce-scatter")


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("zb_h1", 1), ("zb_v", 2)])
def test_a_gpu_executes_no_more_than_the_bubble_says(schedule, chunks):
    alone = _inspected(8 * FSDP, 4 * chunks, mesh={"fsdp": 8}, batch=BatchConfig(microbatch=1))
    useful = executed_flops(alone.program.hlo)
    found = executed_flops(inspected(8, 4 * chunks, schedule=schedule, chunks=chunks).program.hlo)
    assert useful < found <= useful * (8 + STAGES - 1) / 8


@pytest.mark.catches("reductions-leave-their-loop")
def test_sums_over_data_have_no_second_copy():
    """Taken out of the loop over layers, sums of their gradients would take 4 GiB more."""
    one = _inspected(16, 8, mesh={"stage": 2, "data": 4}, pipeline=PipelineConfig(microbatches=4))
    assert one.memory.temp_bytes <= 8.8 * GIB


LAYERS = 32
MATRIX_BYTES = 4 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 4096 * 14336 * 3) * LAYERS // 8
"""Of a device, what the layers' matrices take in float32."""
SLOT_BYTES = (LAYERS // STAGES) * ROW_BYTES
"""Of the inputs that one pass keeps on a device."""
RING_BYTES = (2 * STAGES - 1) * SLOT_BYTES
"""Of all that wait there for their backward pass."""


@pytest.mark.catches("stage-inputs-wait-on-the-device")
def test_host_memory_takes_what_it_is_given():
    here = inspected(8)
    there = inspected(8, offload="parameters=1,optimizer=1,activations=1")
    assert there.memory.host_bytes == 3 * MATRIX_BYTES + RING_BYTES
    assert there.memory.total_bytes <= 7.6 * GIB
    # On the device they are read in their ring; from the host, a pass takes its own back whole.
    # To a hundredth: with the ring there, the peak is at another instant.
    gone = here.memory.temp_bytes - there.memory.temp_bytes
    assert gone >= 0.99 * (RING_BYTES - SLOT_BYTES)
    assert there.memory.argument_bytes <= here.memory.argument_bytes - 3 * MATRIX_BYTES
    module = parse_module(there.program.hlo)
    assert not full_stack_copies(module)
    assert not sync_transfers_in_loops(module)
    assert not host_compute(module)
