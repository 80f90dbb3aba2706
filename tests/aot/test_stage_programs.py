"""A program per stage, compiled for GPUs that are not there: memory, FLOPs, bytes, islands."""

import dataclasses
import functools

import pytest

from colossax.aot import parse_target
from colossax.config import OffloadConfig, PipelineConfig
from colossax.errors import PlanError
from colossax.planner import inspect_run
from colossax.recipes import recipe

pytestmark = [pytest.mark.aot, pytest.mark.timeout(900)]

GIB = 2**30
LAYER = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
TABLE = 128256 * 4096
ROW_BYTES = 8192 * 4096 * 2  # a microbatch between two stages, bfloat16


@functools.cache
def inspected(target, cuts, *, mesh=(("stage", 2), ("fsdp", 2)), layers=4, memory=None, **more):
    """Llama 3 8B of fewer layers, 4 microbatches of one row of 8192 for each device."""
    config = recipe("llama3_8b")
    sizes = dict(mesh)
    pipeline = PipelineConfig(microbatches=4, cuts=cuts, **more)
    rows = 4 * sizes.get("fsdp", 1) * sizes.get("data", 1)
    found = parse_target(target)
    if memory is not None:
        island = found.islands[0]
        gpu = dataclasses.replace(island.gpu, memory_bytes=memory)
        found = dataclasses.replace(found, islands=(dataclasses.replace(island, gpu=gpu),))
    return inspect_run(
        config.replace(
            plan=config.plan.replace(mesh=sizes, pipeline=pipeline),
            data=dataclasses.replace(config.data, global_batch=rows),
            model=dataclasses.replace(config.model, layers=layers),
        ),
        found,
    )


@pytest.mark.catches("stage-programs-flops-once")
def test_what_each_stage_holds_does_and_sends():
    one = inspected("h100:1x4", (3, 1))
    cost = one.pipeline
    first, last = cost.stages
    assert [stage.layers for stage in cost.stages] == [((0, 2),), ((3, 3),)]
    held = [3 * LAYER + TABLE, LAYER + TABLE + 4096]
    for stage, count in zip(cost.stages, held, strict=True):
        assert stage.most["parameters"] == 4 * count // 2
        assert stage.most["optimizer"] == pytest.approx(8 * count // 2, abs=8)
        assert stage.most["gradients"] == 4 * count // 2
    # Of each layer a forward pass, two of backward, and again the first, but for the matmul that
    # leads out of it, which nothing reads; of the head three. Kernels of attention are not seen.
    tokens = 4 * 2 * 8192
    each = 8 * (LAYER - 2 * 4096) - 2 * 4096 * 14336
    assert first.flops == pytest.approx(3 * each * tokens, rel=0.01)
    assert last.flops == pytest.approx((each + 6 * TABLE) * tokens, rel=0.03)
    assert {(edge.origin, edge.end) for edge in cost.edges} == {(0, 1), (1, 0)}
    for edge in cost.edges:
        assert edge.bytes == pytest.approx(4 * ROW_BYTES, rel=1e-3)
        assert edge.link == "nvlink4"
    kept = 3 * ROW_BYTES  # the input of each layer, of a microbatch
    assert first.most["kept for backward"] == pytest.approx(2 * kept, rel=0.1)


def test_what_is_printed_and_written():
    one = inspected("h100:1x4", (3, 1))
    found = one.to_json()
    assert found["device_bytes"]["total"] == max(s["device_bytes"] for s in found["stages"])
    assert [stage["layers"] for stage in found["stages"]] == [[[0, 2]], [[3, 3]]]
    assert found["pipeline"]["executed"] == {"forward": 4, "backward": 4}
    assert found["fits"] and "crossings" not in found
    small = inspected("h100:1x4", (3, 1), memory=8 * GIB)
    assert not small.fits
    assert any(
        line.startswith("stage 0 (layers 0 to 2) needs") and line.endswith("DOES NOT FIT")
        for line in small.pipeline.refusals
    )


def test_host_memory_is_not_counted_ahead():
    config = recipe("llama3_8b")
    plan = config.plan.replace(
        mesh={"stage": 2, "fsdp": 2},
        pipeline=PipelineConfig(cuts=(16, 16)),
        offload=OffloadConfig().with_text("optimizer=1"),
    )
    with pytest.raises(PlanError, match="programs of stages have in host memory is not counted"):
        inspect_run(config.replace(plan=plan), parse_target("h100:1x4"))


def layers_of(one):
    """Of each stage how many."""
    return [sum(b - a + 1 for a, b in stage.layers) for stage in one.pipeline.stages]


@pytest.mark.catches("cuts-without-memory")
def test_cuts_that_are_found_fit_when_they_are_compiled():
    how = {"layers": 8, "speeds": (6.0, 1.0)}
    free = inspected("h100:1x4", "auto", **how)
    assert layers_of(free)[0] > 5
    full = free.pipeline.stages[0].memory.total_bytes
    tight = inspected("h100:1x4", "auto", memory=int(0.9 * full / 0.97), **how)
    assert layers_of(tight)[0] < layers_of(free)[0]
    assert tight.fits


MIXED = "h100:1x2@ib+a100:1x2@roce"


@pytest.mark.catches("island-of-one-kind")
def test_each_island_has_programs_of_its_kind_and_no_group_leaves_it():
    one = inspected(MIXED, "auto")
    cost = one.pipeline
    assert [stage.target.gpu.key for stage in cost.stages] == ["h100", "a100_80"]
    assert layers_of(one)[0] > layers_of(one)[1] >= 1
    assert [edge.link for edge in cost.edges] == ["ethernet", "ethernet"]
    lines = cost.crossings.lines
    assert "between islands by ethernet; copies from device to device, and no group" in lines[1]
    assert "fsdp of 2: within a node by nvlink3, within a node by nvlink4; in the" in lines[2]
    assert lines[-1].endswith("each within one island")
    assert cost.crossings.collectives > 10 and cost.crossings.programs > 8
    found = one.to_json()
    assert [stage["target"] for stage in found["stages"]] == ["h100", "a100_80"]
    assert {axis["axis"] for axis in found["crossings"]["axes"]} == {"stage", "fsdp"}


def test_a_mesh_that_would_cross_islands_is_refused_before_anything_is_compiled():
    with pytest.raises(PlanError, match="it crosses 2 islands"):
        inspected(MIXED, (2, 2), mesh=(("fsdp", 4),))
