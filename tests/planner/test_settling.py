"""What a plan leaves open is decided in one place, in one order, with one margin."""

import dataclasses

import jax
import pytest

from colossax.aot import parse_target
from colossax.config import ExpertsConfig, OffloadConfig, PipelineConfig, Plan, Segment
from colossax.errors import PlanError
from colossax.models import maker
from colossax.offload import device_budget
from colossax.optim import adamw
from colossax.planner import Facts, Fitted, boost, build_step, settle
from colossax.planner.counting.compiled import usable_bytes
from colossax.planner.deciding import settling
from colossax.planner.deciding.settling import ORDER
from colossax.step import StepOptions
from colossax.tasks import next_token_loss
from tests.step.offloaded.streamed import CONFIG, batch
from tests.step.offloaded.test_cpu_update import RATES

MEASURED = dataclasses.replace(RATES, matmul_flops_per_s=2.5e12)
OPEN = Plan(
    segments=(Segment(remat="full", offload="mlp", mlp_share="auto"),),
    offload=OffloadConfig(auto=True, cpu_update="auto", pipelined="auto"),
    experts=ExpertsConfig(chunks="auto"),
)
"""Everything is to be decided."""

PARTS = (maker(CONFIG), adamw(1e-2), next_token_loss())


def facts(**changes):
    make_model, optimizer, loss = PARTS
    given = {
        "options": StepOptions(shapes=batch()),
        "devices": jax.devices()[:1],
        "rates": lambda kind: MEASURED,
        **changes,
    }
    return Facts(make_model=make_model, optimizer=optimizer, loss=loss, **given)


@pytest.fixture
def search(monkeypatch):
    """A search that compiles nothing: of its two candidates the second is taken."""
    tried = []

    def found(make_step, plan, shapes, *, target, agree):
        for shares in ({"parameters": 0.0, "fused": True}, {"parameters": 0.5, "optimizer": 0.5}):
            tried.append(make_step(plan.placed(shares)).bound.plan)
        chosen = plan.placed(shares)
        bytes_of = {"device_bytes": 1, "host_bytes": 1}
        return Fitted(plan=chosen, layers=4, resident={"parameters": 2}, compiles=2, **bytes_of)

    monkeypatch.setattr(settling, "fit_offload", found)
    return tried


@pytest.mark.catches("candidates-unsettled")
def test_everything_is_decided_in_one_order_and_what_is_tried_is_what_runs(search):
    settled = settle(OPEN, facts())
    assert tuple(settled.reasons) == tuple(each for each in ORDER if each != "pipeline.cuts")
    assert [line.split(":")[0] for line in settled.reasons.values()] == [
        "plan.offload auto",
        "plan.offload.cpu_update auto",
        "plan.offload.pipelined auto",
        "plan.experts.chunks auto",
        "segments.mlp_share auto",
    ]
    plan, resident = settled.plan, search[0]
    assert plan == search[1] and plan.hash == search[1].hash != OPEN.hash
    assert 0 < plan.offload.cpu_update < 1 and 0 < plan.segments[0].mlp_share <= 1
    assert (plan.offload.auto, plan.offload.pipelined) == (False, "off")
    assert resident.offload.cpu_update == 0, "there is nothing that the CPU could update"


def test_the_answer_is_a_plan_like_any_other(search):
    """Written down, read, and built without being asked again."""
    settled = settle(OPEN, facts())
    again = Plan.from_json(settled.plan.to_json())
    assert again.hash == settled.plan.hash
    assert settle(again, facts(rates=pytest.fail)).reasons == {}
    options = {"devices": jax.devices()[:1], "shapes": batch()}
    step = build_step(*PARTS, settled, **options)
    assert step.note == "\n".join(settled.reasons.values())
    plain = build_step(*PARTS, again, **options)
    assert plain.note is None and plain.bound.plan == step.bound.plan == settled.plan


def test_boost_settles_with_a_batch(search, tmp_path, monkeypatch):
    monkeypatch.setenv("COLOSSAX_CACHE", str(tmp_path))
    state, step = boost(*PARTS, OPEN, devices=jax.devices()[:1], shapes=batch())
    assert step.bound.plan == search[1] and step.note.startswith("plan.offload auto: of 4 layers")
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state["params"])}
    assert "pinned_host" in kinds


def test_a_share_that_nothing_is_there_for_is_off():
    plan = Plan(offload=OffloadConfig(optimizer=1.0, cpu_update="auto"))
    settled = settle(plan, facts())
    assert settled.plan.offload.cpu_update == 0
    assert settled.reasons == {
        "offload.cpu_update": "plan.offload.cpu_update auto: off, no layer has parameters and"
        " optimizer state in host memory"
    }
    build_step(*PARTS, settled, devices=jax.devices()[:1])


@pytest.mark.catches("chunks-by-the-fast-link")
def test_chunks_go_by_the_slowest_link_of_the_group():
    plan = Plan(mesh={"expert": 2, "tensor": 4}, experts=ExpertsConfig(chunks="auto"))
    asked = {"devices": jax.devices(), "options": StepOptions()}
    one, two = (
        settle(plan, facts(target=parse_target(target), **asked)).plan.experts.rates
        for target in ("h100:1x8", "h100:2x4@ib")
    )
    assert (one.bytes_per_s, two.bytes_per_s) == (360e9, 42e9)
    assert one.flops_per_s == two.flops_per_s == 0.4 * 494.7e12  # of float32
    here = settle(plan, facts(**asked))
    assert here.plan.experts.chunks == 1
    assert here.reasons["experts.chunks"].startswith("plan.experts.chunks auto: 1, how fast rows")


@pytest.mark.parametrize("setting", ORDER)
def test_a_step_decides_nothing(setting):
    room, name = setting.split(".")
    plan = {
        "segments": lambda: OPEN.replace(offload=OffloadConfig(), experts=ExpertsConfig()),
        "experts": lambda: Plan(experts=ExpertsConfig(chunks="auto")),
        "pipeline": lambda: Plan(pipeline=PipelineConfig(cuts="auto")),
        "offload": lambda: Plan(offload=OffloadConfig(**{name: name == "auto" or "auto"})),
    }[room]()
    with pytest.raises(PlanError, match=rf"plan\.{setting}: is yet to be decided .* settle it"):
        build_step(*PARTS, plan, devices=jax.devices()[:1])


def test_shares_depend_on_a_batch():
    with pytest.raises(PlanError, match=r"not known yet, and depend on the tokens .*shapes=batch"):
        settle(OPEN, facts(options=StepOptions()))


@pytest.mark.catches("margin-of-its-own")
def test_what_is_searched_and_what_is_inspected_have_one_margin():
    target = parse_target("h200:1x1")
    memory = target.gpu.memory_bytes
    assert device_budget(None, memory) == int(usable_bytes(target)) == int(0.97 * memory)
    assert device_budget(8.0, memory) == 8_000_000_000
