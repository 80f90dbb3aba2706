"""Targets made of islands: devices in a mesh, which axis crosses what, the proof of it."""

import dataclasses
import types

import jax
import pytest

from colossax.aot import exchanging, parse_target
from colossax.config import OffloadConfig, PipelineConfig, Plan
from colossax.errors import InputError, PlanError
from colossax.pallas.target import target_of
from colossax.planner.counting.counted_stages import check_counted_stages
from colossax.planner.counting.islands import (
    check_one_island,
    check_programs_apart,
    device_numbers,
    mesh_crossings,
    proved,
    stage_link,
    stage_target,
)
from colossax.planner.deciding.candidates import compare_layouts
from colossax.planner.deciding.trial import choosing_for
from colossax.recipes import recipe

TARGET = parse_target("h100:2x2@ib+a100:1x4@roce")
PLAN = Plan(mesh={"stage": 2, "fsdp": 2, "tensor": 2})
HLO = """HloModule written, is_scheduled=true, num_partitions=4

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %sum = f32[8]{0} all-reduce(%x), channel_id=1, replica_groups=TENSOR, to_apply=%add
  ROOT %moved = f32[8]{0} collective-permute(%sum), channel_id=2, source_target_pairs={{0,2},{2,0}}
}
"""


def text(groups="{{0,1},{2,3}}"):
    return HLO.replace("TENSOR", groups)


def places():
    return dict(zip(jax.devices(), TARGET.places, strict=True))


def stage_mesh(number, devices=None):
    return PLAN.bind(devices).stage(number).mesh


def test_groups_of_every_collective():
    found = list(exchanging(text(), stage_mesh(0)))
    assert found == [
        ("all-reduce", ("tensor",), ((0, 1), (2, 3))),
        ("collective-permute", ("fsdp",), ((0, 2),)),
    ]
    assert [kind for kind, *_ in exchanging(text("{{0},{1},{2},{3}}"), stage_mesh(0))] == [
        "collective-permute"
    ]


def test_which_axis_crosses_what():
    lines = mesh_crossings(PLAN, TARGET).lines
    assert lines[1:4] == [
        "  stage of 2: between islands by ethernet; copies from device to device, and no group in"
        " any program",
        "  fsdp of 2: within a node by nvlink3, between nodes of h100:2x2@ib by ib",
        "  tensor of 2: within a node by nvlink3, within a node by nvlink4",
    ]


@pytest.mark.catches("crossings-as-claimed")
def test_programs_prove_it():
    programs = [(f"stage {n}", text(), stage_mesh(n)) for n in range(2)]
    found = proved(mesh_crossings(PLAN, TARGET), TARGET, programs, places())
    assert (found.programs, found.collectives, found.groups) == (2, 4, 6)
    by_axis = {one.axis: one for one in found.axes}
    assert (by_axis["stage"].groups, by_axis["fsdp"].groups, by_axis["tensor"].groups) == (0, 2, 4)
    assert [one.reach for one in by_axis["fsdp"].found] == ["within a node", "between nodes"]
    assert {one.reach for one in by_axis["tensor"].found} == {"within a node"}
    assert found.lines[-1] == (
        "read in 2 compiled programs: 4 collectives, 6 groups of devices, each within one island"
    )


@pytest.mark.catches("crossing-unseen")
def test_a_group_that_crosses_islands_is_an_error():
    """Devices in an order that no plan would choose."""
    devices = jax.devices()[2:] + jax.devices()[:2]
    mesh = stage_mesh(0, devices)
    crossings = mesh_crossings(PLAN, TARGET)
    proved(crossings, TARGET, [("a", text().replace("{0,2},{2,0}", "{0,1}"), mesh)], places())
    with pytest.raises(RuntimeError) as refused:
        proved(crossings, TARGET, [("forward", text(), mesh)], places())
    assert str(refused.value) == (
        "forward: collective-permute among devices (0, 2): a collective crosses islands"
        " 'h100:2x2@ib' and 'a100_80:1x4@roce', which none may"
    )


def test_several_chunks_send_around():
    target = parse_target("h100:1x2+a100:1x2+h100:1x2")
    plan = Plan(mesh={"stage": 6})
    assert [one.shown for one in mesh_crossings(plan, target).axes[0].reaches] == [
        "within a node by nvlink3",
        "within a node by nvlink4",
        "between islands by ethernet",
    ]
    one = parse_target("h100:2x2@ib")
    plan = Plan(mesh={"stage": 2, "tensor": 2})
    around = plan.replace(pipeline=PipelineConfig(chunks=2))
    for each in (plan, around):
        stage = mesh_crossings(each, one).axes[0]
        assert [reach.shown for reach in stage.reaches] == ["between nodes of h100:2x2@ib by ib"]


def test_the_island_of_a_stage():
    plan = Plan(mesh={"stage": 4, "fsdp": 2})
    keys = [stage_target(plan, TARGET, n).gpu.key for n in range(4)]
    assert keys == ["h100", "h100", "a100_80", "a100_80"]
    assert device_numbers(plan, TARGET) == tuple(range(8))


def ordered(order, **mesh):
    return Plan(mesh=mesh, pipeline=PipelineConfig(cuts=(1,) * len(order), order=order))


@pytest.mark.catches("islands-order")
def test_stages_that_change_places_take_their_islands_along():
    """What `bind` does with devices is done with their numbers."""
    kinds = parse_target("h100:1x4+a100:1x4")
    plan = ordered((1, 0), stage=2, fsdp=4)
    assert [stage_target(plan, kinds, n).gpu.key for n in range(2)] == ["a100_80", "h100"]
    in_mesh = [jax.devices()[number] for number in device_numbers(plan, kinds)]
    assert in_mesh == list(plan.bind().mesh.devices.flat)
    alike = parse_target("h100:1x2@ib+h100:2x1@roce")
    plan = ordered((1, 0), stage=2, fsdp=2)
    places = [alike.places[number] for number in device_numbers(plan, alike)]
    assert [(one.island, one.node) for one in places] == [(1, 0), (1, 1), (0, 0), (0, 0)]


def test_stages_that_change_places_send_over_other_links():
    nodes = parse_target("h100:2x4")
    for order, links in (((0, 1, 2, 3), "nvlink4 ib nvlink4"), ((0, 2, 1, 3), "ib ib ib")):
        plan = ordered(order, stage=4, fsdp=2)
        assert [stage_link(plan, nodes, n, n + 1).name for n in range(3)] == links.split()
    reaches = mesh_crossings(ordered((0, 2, 1, 3), stage=4, fsdp=2), nodes).axes[0].reaches
    assert [one.link for one in reaches] == ["ib"]


def test_a_mesh_that_would_cross_is_refused():
    with pytest.raises(PlanError, match=r"it crosses 2 islands \(h100:2x2@ib: 4 devices,"):
        mesh_crossings(Plan(mesh={"fsdp": -1}), TARGET)
    alike = r"it crosses 2 islands \(h100:1x4: 4 devices, h100:1x4: 4 devices\), which"
    with pytest.raises(PlanError, match=alike):
        mesh_crossings(Plan(mesh={"fsdp": 8}), parse_target("h100:1x4+h100:1x4"))
    with pytest.raises(PlanError, match="a stage has 8 devices .fsdp=8., and the 12 of island"):
        mesh_crossings(Plan(mesh={"stage": 2, "fsdp": 8}), parse_target("h100:1x12+a100:1x4"))


def test_what_is_done_for_one_island_is_refused_for_several():
    check_one_island(parse_target("h100:2x8"), "--largest-microbatch")
    with pytest.raises(PlanError, match="--largest-microbatch: it is for GPUs of one kind and"):
        check_one_island(TARGET, "--largest-microbatch")


def test_layouts_are_compared_on_one_island_and_of_one_stack():
    with pytest.raises(PlanError, match="--compare-layouts: it is for GPUs of one kind and"):
        compare_layouts(recipe("llama_tiny"), TARGET)
    with pytest.raises(InputError, match="t5_stdlib has an encoder and a decoder, and what layout"):
        compare_layouts(recipe("t5_stdlib"), parse_target("h100:1x2"))


def there(gpu):
    return types.SimpleNamespace(device_kind=gpu.name, platform="cuda")


@pytest.mark.catches("capability-unknown")
def test_kernels_are_chosen_for_the_gpus_of_the_plan_in_force():
    large, small = (there(island.gpu) for island in TARGET.islands)
    assert target_of(large).compute_capability is None
    with choosing_for(TARGET):
        assert target_of(large).compute_capability == (9, 0)
        assert target_of(small).compute_capability == (8, 0)
    assert dataclasses.asdict(target_of(small))["compute_capability"] is None


@pytest.mark.catches("islands-one-program")
def test_one_program_for_several_islands_is_refused():
    check_programs_apart(PLAN, parse_target("h100:2x8"))
    check_programs_apart(PLAN.replace(pipeline=PipelineConfig(cuts="auto")), TARGET)
    with pytest.raises(PlanError, match=r"which no GPU of another kind runs; give --plan.pipeline"):
        check_programs_apart(PLAN, TARGET)


def test_on_several_islands_host_memory_is_refused_with_what_islands_have():
    plan = PLAN.replace(offload=OffloadConfig().with_text("optimizer=1"))
    for target, remedies in (
        (TARGET, "inspect with --plan.offload none"),
        (TARGET.apart[0], "inspect with --plan.offload none, or leave plan.pipeline.cuts out"),
    ):
        with pytest.raises(
            PlanError, match="plan.offload: what programs of stages have"
        ) as refused:
            check_counted_stages(plan, target)
        assert str(refused.value).split("; ")[1] == remedies
