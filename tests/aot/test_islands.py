"""Clusters of several networks and kinds of GPUs: compiled, no group leaves its island."""

import dataclasses

import pytest

from colossax.aot import parse_target
from colossax.config import PipelineConfig
from colossax.errors import PlanError
from colossax.planner import inspect_run
from colossax.recipes import recipe

pytestmark = [pytest.mark.aot, pytest.mark.timeout(900)]

CLUSTERS = {
    "h100:1x2+a100:1x2": {"stage": 2, "fsdp": 2},
    "a100:1x2+h100:1x2": {"stage": 2, "tensor": 2},
    "h100:2x1@ib+a100:1x2@roce": {"stage": 2, "data": 2},
    "h100:1x4+a100:1x4": {"stage": 2, "fsdp": 2, "tensor": 2},
    "h200:1x4+h100:1x4": {"stage": 2, "data": 2, "fsdp": 2},
    "h100:1x4@ib+a100:2x2@roce": {"stage": 2, "ring": 2, "tensor": 2},
    "h100:2x2@ib+a100:2x2@ib": {"stage": 2, "fsdp": 4},
    "h100:1x4+a100:1x2": {"stage": 3, "tensor": 2},
    "h100:1x2+a100:1x4": {"stage": 3, "fsdp": 2},
    "h100:1x2+h200:1x2": {"stage": 2, "ulysses": 2},
    "h100:1x2+a100:1x2+h100:1x2": {"stage": 3, "fsdp": 2},
    "h100:1x4+h100:1x4@ethernet": {"stage": 2, "tensor": 4},
    "a100:2x2@ib+h100:1x4@roce": {"stage": 2, "data": 4},
    "h100:1x8+a100:1x4": {"stage": 3, "fsdp": 4},
    "h100:1x2+a100:1x6": {"stage": 4, "ring": 2},
    "h100:4x1@ib+a100:4x1@roce": {"stage": 2, "fsdp": 4},
    "h100:1x1+a100:1x1": {"stage": 2},
    "h200:1x2+h100:1x2+a100:1x2": {"stage": 3, "tensor": 2},
    "h100:1x4@roce+h100:1x4@ib": {"stage": 2, "data": 2, "tensor": 2},
    "a100:2x2@ib+h100:1x2@ib": {"stage": 3, "fsdp": 2},
}


def inspected(target, mesh, order=None):
    """A tiny Llama, a layer of it on each stage."""
    config = recipe("llama_tiny")
    stages = mesh["stage"]
    sizes = {"vocab": 256, "embed": 64, "mlp": 96, "heads": 4, "kv_heads": 4, "layers": stages}
    rows = 2 * mesh.get("data", 1) * mesh.get("fsdp", 1)
    pipeline = PipelineConfig(microbatches=2, cuts=(1,) * stages, order=order)
    return inspect_run(
        config.replace(
            model=dataclasses.replace(config.model, **sizes),
            plan=config.plan.replace(mesh=mesh, pipeline=pipeline),
            data=dataclasses.replace(config.data, global_batch=rows, seq_len=128),
        ),
        parse_target(target),
    )


@pytest.mark.parametrize(("target", "mesh"), CLUSTERS.items(), ids=CLUSTERS)
def test_no_group_leaves_an_island(target, mesh):
    cost = inspected(target, mesh).pipeline
    kinds = {island.gpu.key for island in parse_target(target).islands}
    assert {stage.target.gpu.key for stage in cost.stages} == kinds
    by_axis = {axis.axis: axis for axis in cost.crossings.axes}
    assert by_axis["stage"].groups == 0
    inner = [axis for axis in mesh if axis != "stage"]
    assert all(by_axis[axis].groups > 0 for axis in inner)
    assert all(reach.reach != "between islands" for a in inner for reach in by_axis[a].found)
    assert cost.crossings.programs >= 2 * len(kinds)


def test_stages_that_change_places_are_counted_where_they_are():
    cost = inspected("h100:2x1@roce+a100:1x2", {"stage": 2, "fsdp": 2}, (1, 0)).pipeline
    assert [stage.target.gpu.key for stage in cost.stages] == ["a100_80", "h100"]
    links = [{link.link for link in stage.links} for stage in cost.stages]
    assert links == [{"nvlink3"}, {"roce"}]


@pytest.mark.parametrize(
    ("target", "mesh", "reason"),
    [
        (
            "h100:1x3+a100:1x1",
            {"stage": 2, "fsdp": 2},
            "the 3 of island 'h100:1x3' are no multiple",
        ),
        ("h100:1x2+a100:1x2", {"stage": 1, "fsdp": 4}, "it crosses 2 islands"),
        (
            "h100:1x2+a100:1x6",
            {"stage": 2, "fsdp": 4},
            "the 2 of island 'h100:1x2' are no multiple",
        ),
    ],
)
def test_where_there_is_no_such_order_it_is_refused(target, mesh, reason):
    with pytest.raises(PlanError, match=reason):
        inspected(target, mesh)
