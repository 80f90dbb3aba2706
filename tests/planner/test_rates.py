"""Rates that were measured, in the place of those that are assumed of a target."""

import dataclasses

import pytest

from colossax.aot import parse_target
from colossax.aot.targets import Link
from colossax.config import BatchConfig, Segment, preset
from colossax.planner.profiling import profile_task
from colossax.planner.searching import predict
from colossax.planner.searching.search import again, search
from colossax.planner.searching.seconds import (
    HIDING,
    MATMULS,
    PAIRS,
    SLOWING,
    Rates,
    Seconds,
    rates_of,
)
from colossax.recipes import recipe
from colossax.tasks import task_of

TARGET = parse_target("h100:2x4")


@pytest.fixture(scope="module")
def tiny():
    """A small Llama, read once, and a plan with every kind of collective."""
    config = recipe("llama_tiny")
    profile = profile_task(task_of(config), config.plan, TARGET)
    plan = preset("zero3+megatron_sp", mesh={"fsdp": 4, "tensor": 2})
    return profile, plan.replace(batch=BatchConfig(microbatch=3), segments=(Segment(remat="full"),))


def seconds(tiny, **changed):
    profile, plan = tiny
    rates = dataclasses.replace(rates_of(TARGET, plan), **changed)
    return predict(profile, plan, TARGET, rates).seconds


def test_what_is_assumed_is_the_default(tiny):
    profile, plan = tiny
    rates = rates_of(TARGET, plan)
    peak = TARGET.gpu.bf16_flops / 2  # float32, in TF32
    assert rates.matmuls == pytest.approx(MATMULS * peak, rel=1e-3)
    assert rates.pairs == pytest.approx(PAIRS * peak, rel=1e-3)
    assert (rates.node, rates.network) == (TARGET.gpu.nvlink, TARGET.network)
    assert (rates.hiding, rates.slowing) == (HIDING, SLOWING)
    assert predict(profile, plan, TARGET, rates) == predict(profile, plan, TARGET)
    room = 1e9
    assumed = search(profile, plan, TARGET, room=room).candidates
    given = search(profile, plan, TARGET, room=room, rates=rates).candidates
    assert [one.plan for one in given] == [one.plan for one in assumed]


@pytest.mark.catches("measured-rates-are-not-taken")
def test_each_rate_is_of_its_term(tiny):
    before, rates = seconds(tiny), rates_of(TARGET, tiny[1])
    slow = seconds(tiny, matmuls=rates.matmuls / 3, pairs=rates.pairs / 3)
    assert slow.compute == pytest.approx(3 * before.compute)
    assert (slow.waited, slow.beside) == (before.waited, before.beside)
    half = {
        name: dataclasses.replace(
            link, latency_s=2 * link.latency_s, bytes_per_s=link.bytes_per_s / 2
        )
        for name, link in (("node", rates.node), ("network", rates.network))
    }
    far = seconds(tiny, **half)
    assert far.waited == pytest.approx(2 * before.waited)
    assert far.beside == pytest.approx(2 * before.beside)
    assert far.compute == before.compute


@pytest.mark.catches("one-link-for-all-kinds")
def test_a_kind_of_collective_may_have_a_link_of_its_own(tiny):
    profile, plan = tiny
    sent = predict(profile, plan, TARGET).sent
    own = Link(name="own", latency_s=0.0, bytes_per_s=1e6)
    found = seconds(tiny, kinds={"reduce-scatter": own})
    before, microbatches = seconds(tiny), 24 // 12
    moved = sum(one.bytes for one in sent if one.kind == "reduce-scatter" and one.hidden)
    assert moved
    others = [one for one in sent if one.hidden and one.kind != "reduce-scatter"]
    assert others
    assert found.beside > before.beside
    without = seconds(tiny, kinds={one.kind: own for one in others} | {"reduce-scatter": own})
    total = sum(one.bytes for one in sent if one.hidden)
    assert without.beside == pytest.approx(microbatches * total / 1e6)


@pytest.mark.catches("calls-cost-nothing")
def test_calls_microbatches_and_steps_may_cost_something(tiny):
    before = seconds(tiny)
    found = seconds(tiny, call_s=1.0, microbatch_s=100.0, step_s=1000.0)
    layers, microbatches = 4, 2
    assert found.total - before.total == pytest.approx(microbatches * (layers + 100.0) + 1000.0)
    assert before.fixed == 0


def test_what_is_hidden_and_slowed_follows_the_rates():
    one = Seconds(compute=1.0, waited=0.5, beside=2.0, hiding=0.25, slowing=0.1)
    assert one.exposed == 1.75
    assert one.total == pytest.approx(1.0 + 0.5 + 1.75 + 0.1 * 0.25)


def test_a_search_ranks_by_them_and_goes_on_with_them(tiny):
    profile, plan = tiny
    no_links = Link(name="no", latency_s=1.0, bytes_per_s=1.0)
    rates = Rates(matmuls=1e12, pairs=1e12, memory=1e12, node=no_links, network=no_links)
    assert rates.hiding == HIDING
    best = search(profile, plan, TARGET, room=1e9, rates=rates).candidates[0]
    assert best.predicted.seconds.total > 8  # of latencies alone
    changed = again(profile, best, TARGET, room=1e9, rates=rates)
    assert changed is not None
    assert changed.predicted.seconds == best.predicted.seconds
