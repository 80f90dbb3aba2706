"""Layers cut into stages by speed and memory: what is counted, what is decided, what is refused."""

import dataclasses

import jax
import pytest

from colossax.aot import parse_target
from colossax.config import MeshAxis, OffloadConfig, PipelineConfig, Plan, Segment
from colossax.errors import PlanError
from colossax.models import maker
from colossax.optim import adamw
from colossax.pipeline import schedule, simulate
from colossax.pipeline.cuts import LayerCost, StageDevice
from colossax.pipeline.measured import save_layer_times, save_link_times
from colossax.planner import Facts, boost, settle
from colossax.planner.counting.layer_costs import StackCosts
from colossax.planner.deciding import stage_cuts as room
from colossax.planner.deciding.cutting import Cutting, in_flight
from colossax.planner.deciding.stage_speeds import links_of, speeds_of
from colossax.sharding.rules import home_stage
from colossax.step import StepOptions
from colossax.tasks import next_token_loss
from tests.oracle import assert_losses_close
from tests.pipeline.test_measured import FAST, LINKS, SLOW
from tests.step import test_parallel_oracle as oracle
from tests.step.stages.test_stages import MODELS, devices_of


def parts(model, **changes):
    config = dataclasses.replace(MODELS[model], **changes)
    return maker(config), adamw(1e-2), next_token_loss()


def found(plan, model="llama", *, layers=8, **changes):
    """The plan settled."""
    make_model, optimizer, loss = parts(model, layers=layers)
    given = {
        "options": StepOptions(shapes=oracle.batch(model, rows=8)),
        "devices": devices_of(plan) if plan.mesh else jax.devices(),
        **changes,
    }
    return settle(plan, Facts(make_model=make_model, optimizer=optimizer, loss=loss, **given))


def asked(mesh, *, remat="full", **more):
    pipeline = PipelineConfig(**{"microbatches": 4, "cuts": "auto", **more})
    return Plan(mesh=mesh, pipeline=pipeline, segments=(Segment(remat=remat),))


@pytest.fixture
def costs(monkeypatch):
    """What was counted, by each call."""
    told, count = [], room.stack_costs
    monkeypatch.setattr(
        room, "stack_costs", lambda *a, **k: told.append(count(*a, **k)) or told[-1]
    )
    return told


@pytest.mark.catches("auto-cuts-speeds")
def test_a_stage_twice_as_fast_gets_about_twice_the_layers():
    settled = found(asked({"stage": 2, "fsdp": 2}, speeds="2,1"), layers=7)
    assert settled.plan.pipeline.cuts == (5, 2)
    (line,) = settled.reasons.values()
    assert line.startswith("plan.pipeline.cuts auto: layers 5,2, a modelled 1.3")
    assert line.endswith(" times as fast as cut evenly (4,3); speeds 2,1 of the stages, as given")
    again = found(asked({"stage": 2, "fsdp": 2}, speeds=(1, 2)), layers=7)
    assert again.plan.pipeline.cuts == (2, 5)


def test_what_was_settled_is_a_plan_like_any_other():
    settled = found(asked({"stage": 2}, speeds="2,1"))
    again = Plan.from_json(settled.plan.to_json())
    assert again == settled.plan and again.pipeline.speeds == (2.0, 1.0)
    assert found(again).reasons == {}
    recomputed = again.replace(pipeline=dataclasses.replace(again.pipeline, cuts="auto"))
    assert found(recomputed).plan == settled.plan
    plain = Plan(mesh={"stage": 2}, pipeline=PipelineConfig(cuts=settled.plan.pipeline.cuts))
    assert "speeds" in plain.to_json() and plain.hash != settled.plan.hash


@pytest.mark.catches("auto-cuts-head")
def test_equal_devices_have_fewer_layers_beside_a_large_head(costs):
    """A vocabulary of 512 multiplies about as much as two and a half of these layers."""
    make_model, optimizer, loss = parts("llama", vocab=512)
    options = StepOptions(shapes=oracle.batch("llama", rows=8))
    facts = Facts(make_model=make_model, optimizer=optimizer, loss=loss, options=options)
    plan = asked({"stage": 2}, remat="none")
    settled = settle(plan, dataclasses.replace(facts, devices=devices_of(plan)))
    (line,) = settled.reasons.values()
    assert settled.plan.pipeline.cuts == (5, 3)
    assert line.endswith("; all devices are 'cpu', which count as equally fast")
    (counted,) = costs
    tokens = 8 // 4 * oracle.batch("llama", rows=8)["tokens"].shape[1]
    assert counted.last.seconds == 6 * tokens * 512 * 16, "two for each product, three times"
    assert 2 < counted.last.seconds / counted.layers[0].seconds < 3
    assert counted.first.seconds == 0


@pytest.mark.catches("auto-cuts-state")
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_modelled_state_is_what_stages_hold_with_gradients(model, costs):
    """The tied table of GPT-2 is held by the first stage and sent to the last, gradient back."""
    settled = found(asked({"stage": 2, "fsdp": 2}, speeds="1,2"), model)
    (counted,), (before, _) = costs, settled.plan.pipeline.cuts
    layers = [layer.state_bytes for layer in counted.layers]
    modelled = [
        sum(layers[:before]) + counted.first.state_bytes,
        sum(layers[before:]) + counted.last.state_bytes,
    ]
    devices = devices_of(settled.plan)
    state, step = boost(*parts(model), settled.plan, devices=devices)
    held = dict.fromkeys(devices, 0)
    for x in jax.tree.leaves((state["params"], state["opt_state"])):
        for shard in x.addressable_shards if x.ndim else ():
            held[shard.device] += shard.data.nbytes
    for x in jax.tree.leaves(state["params"]):
        for shard in x.addressable_shards:  # the sum of the gradients, and a microbatch's
            held[shard.device] += 2 * shard.data.nbytes
    table = state["params"]["embed"]["table"]
    sent = 3 * table.nbytes // 2 if model == "gpt2" else 0
    for stage, bound in enumerate(map(step.bound.stage, range(2))):
        for device in bound.mesh.devices.flat:
            assert modelled[stage] == pytest.approx(held[device] + stage * sent, rel=1e-3)


@pytest.mark.catches("auto-cuts-kept")
def test_layers_keep_what_their_policy_says_of_each_row_of_a_microbatch(costs):
    rows, length, embed = 8 // 4, 32, 16
    for remat in ("full", "none"):
        found(asked({"stage": 2, "fsdp": 2}, remat=remat))
    full, none = costs
    assert full.layers[0].kept_bytes == rows * length * embed * 4 / 2
    assert none.layers[0].kept_bytes == none.working_bytes == full.working_bytes
    assert none.working_bytes > 10 * full.layers[0].kept_bytes
    assert full.layers[0].out_bytes == full.layers[0].kept_bytes


def test_memory_bounds_what_stages_hold():
    """The first stage has four microbatches in flight, the last one; each as large as a layer."""
    target = parse_target("h100:1x4")

    def of(memory):
        gpu = dataclasses.replace(target.gpu, memory_bytes=memory)
        island = dataclasses.replace(target.islands[0], gpu=gpu)
        given = asked({"stage": 4}, remat="none", microbatches=8, speeds="4,1,1,1")
        return found(given, target=dataclasses.replace(target, islands=(island,)))

    free = of(10**9).plan.pipeline.cuts
    bounded = of(900_000).plan.pipeline.cuts
    assert free[0] > bounded[0], "what is fast has no room for more"
    with pytest.raises(PlanError) as refusal:
        of(200_000)
    said = str(refusal.value)
    assert said.startswith("plan.pipeline.cuts auto: stage 0 ('cpu'): layer 0 with 4 microbatches")
    assert said.endswith("give more stages, more memory or a remat that keeps less")


@pytest.mark.slow
@pytest.mark.catches("auto-cuts-chunks")
@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"chunks": 2, "speeds": "2,1"}, (3, 1, 3, 1)),
        ({"schedule": "zb_v", "speeds": "2,1"}, (3, 1, 1, 3)),
    ],
)
def test_each_chunk_counts_as_a_stage_on_its_devices(more, expected):
    assert found(asked({"stage": 2}, **more)).plan.pipeline.cuts == expected


def even(count, **given):
    nothing = LayerCost(seconds=0.0)
    layers = tuple(LayerCost(seconds=1.0, **given) for _ in range(count))
    return StackCosts(layers=layers, first=nothing, last=nothing, working_bytes=0.0)


@pytest.mark.catches("auto-cuts-chunk-memory")
def test_chunks_of_a_stage_share_its_memory():
    """By speed alone the first would have six of eight layers; it holds four."""
    table = schedule("interleaved", 2, 8, 2, "free")
    stages = [StageDevice(speed=3.0, memory_bytes=4.0), StageDevice()]

    def cut(**given):
        cutting = Cutting(costs=even(8, **given), stages=stages, table=table)
        return cutting.decided(search=False)[0].layers

    assert (cut(), cut(state_bytes=1.0)) == ((3, 1, 3, 1), (2, 2, 2, 2))
    with pytest.raises(
        PlanError,
        match="auto: none are found that give each of a stage's 2 chunks .* stage 0: layer 0 with",
    ):
        cut(state_bytes=3.0)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1"])
def test_in_flight_is_what_the_schedule_keeps(name):
    table = schedule(name, 4, 3 if name == "1f1b" else 9, 1, "free")
    assert in_flight(table) == list(simulate(table, form="free").kept)


@pytest.mark.catches("auto-cuts-kinds")
def test_devices_of_several_kinds_are_as_fast_as_was_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("COLOSSAX_CACHE", str(tmp_path))
    kinds = [["NVIDIA H100"] * 2, ["NVIDIA H100", "NVIDIA A100"]]
    sentence = "'NVIDIA A100'; run colossax bench stages llama3_8b there, or give speeds"
    with pytest.raises(PlanError, match=sentence):
        speeds_of(kinds, None, "llama3_8b")
    with pytest.raises(PlanError, match=r"several kinds .*--plan.pipeline.speeds 2,1"):
        speeds_of(kinds, None, None)
    save_layer_times(FAST)
    save_layer_times(SLOW)
    speeds = speeds_of(kinds, None, "llama3_8b")
    assert speeds.relative == pytest.approx((1.0, 0.4)), "as fast as its slowest device"
    assert speeds.known_by == "speeds 1,0.4 as colossax bench stages measured"
    assert speeds.flops_per_s is None, "measured before FLOPs were counted"
    save_layer_times(dataclasses.replace(FAST, flops=5e12))
    save_layer_times(dataclasses.replace(SLOW, flops=5e12))
    assert speeds_of(kinds, None, "llama3_8b").flops_per_s == 5e14, "0.01 s, at the median"
    assert speeds_of(kinds[:1] * 2, None, None).relative == (1.0, 1.0)
    assert speeds_of(kinds, (1.0, 4.0), None).relative == (0.25, 1.0)


def test_of_devices_that_are_not_there_data_sheets_say_how_fast_they_are():
    kinds = [["NVIDIA H100"], ["NVIDIA A100"]]
    peaks = {"NVIDIA H100": 1000.0, "NVIDIA A100": 250.0}
    speeds = speeds_of(kinds, None, None, peak=peaks.get)
    assert speeds.relative == (1.0, 0.25)
    assert speeds.known_by == "speeds 1,0.25 by the peaks of their data sheets"
    with pytest.raises(PlanError, match="of several kinds"):
        speeds_of(kinds, None, None, peak=lambda kind: None)


@pytest.mark.catches("auto-cuts-links")
def test_links_are_those_that_were_measured_the_slowest_of_those_side_by_side(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("COLOSSAX_CACHE", str(tmp_path))
    a, h = "NVIDIA A100", "NVIDIA H100"
    kinds = [[h, h], [h, a], [a, a]]
    save_link_times(LINKS)
    assert links_of(kinds, "llama3_8b") is None, "not all of them"
    for kind, bytes_per_s in ((a, 1e9), (h, 9e9)):
        pair = dataclasses.replace(LINKS.pairs[0], seconds=LINKS.sent_bytes / bytes_per_s)
        save_link_times(
            dataclasses.replace(LINKS, device_kind=kind, other_kind=kind, pairs=(pair,))
        )
    found = links_of(kinds, "llama3_8b")
    across = LINKS.link.bytes_per_s
    rates = [[link.bytes_per_s for link in row] for row in found]
    assert rates[0][1:] == pytest.approx([across, across])
    assert rates[1][2] == pytest.approx(across) and rates[2][1] == rates[1][2]
    assert links_of(kinds, None) is None


def test_what_was_measured_gives_seconds_and_links_count(tmp_path, monkeypatch, costs):
    monkeypatch.setenv("COLOSSAX_CACHE", str(tmp_path))
    here = {"device_kind": "cpu", "recipe": "mine"}
    save_layer_times(dataclasses.replace(FAST, **here, flops=1e7))
    plan = asked({"stage": 2, "fsdp": 2})
    (line,) = found(plan, recipe="mine").reasons.values()
    (counted,) = costs
    seconds = (4 * counted.layers[0].seconds + counted.last.seconds) / (1e9 * 2)
    assert f"layers 4,4, modelled {seconds:.3g} s for the slowest stage, cut evenly" in line
    slow = dataclasses.replace(LINKS.pairs[0], seconds=2e3)
    save_link_times(dataclasses.replace(LINKS, **here, other_kind="cpu", pairs=(slow,)))
    (line,) = found(plan, recipe="mine").reasons.values()
    sent = counted.layers[0].out_bytes / (LINKS.sent_bytes / 2e3)
    assert f"modelled {seconds + sent:.3g} s" in line, "the gradient, to the stage before"
    assert line.endswith("; links as colossax bench links measured")


HEAD = LayerCost(seconds=3.0)


def ends(count, **given):
    return dataclasses.replace(even(count, **given), last=HEAD)


@pytest.mark.catches("auto-order")
def test_the_order_of_devices_is_found_where_it_is_asked_for_and_else_told():
    """The slower device has more of the layers to itself where it has no head."""
    table = schedule("1f1b", 2, 8, 1, "free")
    stages = [StageDevice(speed=2.0), StageDevice(speed=1.0)]
    cutting = Cutting(costs=ends(4), stages=stages, table=table)
    cuts, order, told = cutting.decided(search=False)
    assert (cuts.layers, cuts.slowest_s, order) == ((3, 1), 4.0, None)
    assert told == [
        "with devices in the order 1,0 (--plan.pipeline.order auto) a modelled 1.60 times as fast"
    ]
    cuts, order, told = cutting.decided(search=True)
    assert (cuts.layers, cuts.slowest_s, order) == ((2, 2), 2.5, [1, 0])
    assert told == ["devices in the order 1,0"]
    turned = Cutting(costs=ends(4), stages=stages, table=table, order=(1, 0))
    assert turned.decided(search=False)[2][0].startswith("with devices in the order 0,1 (")
    alike = Cutting(costs=ends(4), stages=stages[:1] * 2, table=table)
    assert alike.decided(search=True)[1:] == (None, [])


def test_an_order_in_which_layers_fit_is_told_where_they_do_not():
    ticks = schedule("1f1b", 2, 8, 1, "free")
    stages = [StageDevice(memory_bytes=3.0), StageDevice(memory_bytes=10.0)]
    table = LayerCost(seconds=0.0, state_bytes=5.0)
    costs = dataclasses.replace(even(4, state_bytes=1.0), first=table)
    with pytest.raises(PlanError) as refusal:
        Cutting(costs=costs, stages=stages, table=ticks).decided(search=False)
    said = str(refusal.value)
    assert said.startswith("plan.pipeline.cuts auto: stage 0: layer 0 with 2 microbatches")
    assert said.endswith("; with devices in the order 1,0 (--plan.pipeline.order auto) they fit")


def test_an_order_of_several_chunks_is_not_searched_for():
    table = schedule("interleaved", 2, 8, 2, "free")
    stages = [StageDevice(speed=2.0), StageDevice()]
    with pytest.raises(PlanError, match="plan.pipeline.order auto: .* of one chunk; give"):
        Cutting(costs=even(8), stages=stages, table=table).decided(search=True)


@pytest.mark.catches("order-of-stages")
def test_stages_have_their_devices_in_the_order_that_is_given():
    devices = jax.devices()[:4]
    given = Plan(mesh={"stage": 2, "fsdp": 2}, pipeline=PipelineConfig(order="1,0"))
    bound = given.bind(devices)
    assert list(bound.stage(0).mesh.devices.flat) == devices[2:]
    assert list(bound.stage(1).mesh.devices.flat) == devices[:2]
    assert Plan(pipeline=given.pipeline).bind(devices).mesh.size == 4, "one stage has no order"
    with pytest.raises(PlanError, match=r"order: found 2 numbers for 4 stages; .* 0 to 3 once"):
        Plan(mesh={"stage": 4}, pipeline=given.pipeline).bind(devices)


@pytest.mark.catches("speeds-in-order")
def test_speeds_are_of_devices_as_they_come_and_go_with_the_order():
    settled = found(asked({"stage": 2}, speeds="1,3", order="1,0")).plan.pipeline
    assert settled.cuts[0] > settled.cuts[1] and settled.order == (1, 0)
    plain = found(asked({"stage": 2}, speeds="3,1")).plan.pipeline
    assert plain.cuts == settled.cuts and plain.order is None


@pytest.mark.parametrize("given", ["1,1", "1,2", "0,x", [], "2", {"a": 1}, [0, -1]])
def test_orders_that_cannot_be_are_refused(given):
    with pytest.raises(PlanError, match="order: found .* give each number from 0 on once, as 1,0"):
        PipelineConfig(order=given)


def test_an_order_is_found_with_cuts_alone():
    with pytest.raises(PlanError, match="order: 'auto' is found with cuts of auto"):
        PipelineConfig(order="auto", cuts="5,3")


@pytest.mark.parametrize(
    ("plan", "changes", "sentence"),
    [
        (
            asked({"fsdp": 8}, microbatches=None),
            {},
            "'stage' has size 1, so .* nothing to cut; .*none",
        ),
        (
            asked({"stage": 2}, speeds="1,1,1"),
            {},
            "speeds: found 3 for 2 stages; give one for each",
        ),
        (
            asked({"stage": 8, "data": 1}, chunks=2),
            {},
            "8 stages of 2 chunks need 16 layers or more, and there are 8; give .* or chunks$",
        ),
        (
            asked({"stage": 8, "data": 1}),
            {"layers": 4},
            "8 stages need 8 layers or more, and there are 4; give fewer stages$",
        ),
        (
            asked({"stage": 2}, schedule="interleaved"),
            {},
            "schedule 'interleaved' wants several; give plan.pipeline.chunks 2 or more$",
        ),
        (asked({"stage": 2}, table="own.json"), {}, "plan.pipeline.table: .* leave one of the two"),
        (
            asked({"stage": 2}),
            {"options": StepOptions()},
            r"depends on the tokens of a batch, .* as in boost\(..., shapes=batch\)",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(plan, changes, sentence):
    with pytest.raises(PlanError, match=sentence):
        found(plan, **changes)


@pytest.mark.parametrize("given", ["2,0", "1,-1", "1,x", [], [1, float("inf")], {"a": 1}, "nan"])
def test_speeds_that_cannot_be_are_refused(given):
    with pytest.raises(PlanError, match="speeds: found .* give a number above 0 for each stage"):
        PipelineConfig(cuts="auto", speeds=given)


def test_speeds_alone_do_nothing_and_are_refused():
    with pytest.raises(PlanError, match="speeds: found 2,1, .*cuts auto, or leave them out"):
        PipelineConfig(speeds="2,1")


@pytest.mark.catches("uneven-names-auto")
def test_layers_that_stages_do_not_divide_are_told_of_auto():
    plan = asked({"stage": 2}, cuts=None)
    with pytest.raises(PlanError, match=r"cannot share 7 layers .* auto.*about 4 or 3 layers each"):
        boost(*parts("llama", layers=7), plan, devices=devices_of(plan))


@pytest.mark.catches("auto-cuts-offload")
def test_what_host_memory_has_takes_none_of_the_devices(costs):
    plan = asked({"stage": 2})
    for each in (plan, plan.replace(offload=OffloadConfig(optimizer=1.0, activations=1.0))):
        found(each)
    on_device, on_host = (counted.layers[0] for counted in costs)
    assert (on_device.kept_bytes > 0, on_host.kept_bytes) == (True, 0)
    assert on_host.state_bytes == pytest.approx(on_device.state_bytes * 3 / 5), "without moments"


@pytest.mark.parametrize(
    ("layers", "plan"),
    [
        (3, asked({"stage": 2, "fsdp": 2}, speeds="1,2", order="auto")),
        (6, asked({"stage": 4}, speeds="2,1,1,2")),
    ],
)
def test_a_run_with_cuts_that_were_found_equals_one_device(layers, plan):
    batch, losses = oracle.batch("llama", rows=8), []
    for each in (Plan(), plan):
        devices = devices_of(each) if each.mesh else oracle.ONE
        state, step = boost(*parts("llama", layers=layers), each, devices=devices, shapes=batch)
        told = []
        for _ in range(3):
            state, metrics = step(state, batch)
            told.append(float(metrics["loss"]))
        losses.append(told)
    assert step.note.startswith("plan.pipeline.cuts auto: layers ")
    cuts = step.bound.plan.pipeline.cuts
    assert sum(cuts) == layers and len(set(cuts)) > 1
    assert {home_stage(step.bound, info) for info in jax.tree.leaves(step.spec.infos)} == set(
        range(step.bound.mesh.shape[MeshAxis.STAGE])
    )
    assert_losses_close(losses[1], losses[0])
