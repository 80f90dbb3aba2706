"""Plans as they are, predicted: those that are written by hand too."""

import dataclasses
import math

import jax
import pytest

from colossax.aot import parse_target
from colossax.config import BatchConfig, Plan, Segment, preset
from colossax.planner.profiling import profile_task
from colossax.planner.searching import Subject, plan_run, planned, predict
from colossax.planner.searching.parts import Parts, abstract
from colossax.planner.searching.search import search
from colossax.planner.searching.seconds import link_along, rates_of
from colossax.recipes import recipe
from colossax.sharding import resolve
from colossax.tasks import task_of

TARGET = parse_target("h100:1x8")


@pytest.mark.catches("names-that-layers-lack")
def test_layers_keep_those_names_that_they_give():
    """A mixture names nothing of its experts' hidden units, and `none` keeps all that has a name"""
    config = recipe("moe_tiny")
    profile = profile_task(task_of(config), Plan(), TARGET)
    plan = preset("zero3", mesh={"fsdp": 8})

    def predicted(*remats):
        counts = (2, -1)[-len(remats) :]
        runs = tuple(
            Segment(count=count, remat=remat) for count, remat in zip(counts, remats, strict=True)
        )
        return predict(profile, plan.replace(segments=runs), TARGET)

    assert predicted("none") == predicted("qkv+attention+mlp") == predicted("qkv+attention")
    assert predicted("mlp") == predicted("full")
    assert predicted("mlp", "none") == predicted("full", "qkv+attention")
    assert predicted("full").bytes.kept < predicted("none").bytes.kept


@pytest.mark.catches("links-of-another-axis")
@pytest.mark.parametrize(
    ("name", "mesh", "rules"),
    [
        ("llama_tiny", {"fsdp": 2, "tensor": 4}, "zero3+megatron_sp"),
        ("llama_tiny", {"data": 2, "fsdp": 2, "ring": 2}, "zero2"),
        ("moe_tiny", {"fsdp": 2, "expert": 4}, "zero3"),
    ],
)
def test_seconds_are_those_of_all_that_is_sent(name, mesh, rules):
    config = recipe(name)
    data = dataclasses.replace(config.data, global_batch=48)
    profile = profile_task(task_of(config.replace(data=data)), Plan(), TARGET)
    plan = preset(rules, mesh=mesh).replace(batch=BatchConfig(microbatch=3))
    plan = plan.replace(segments=(Segment(count=1, remat="full"), Segment(remat="attention")))
    found, rates = predict(profile, plan, TARGET), rates_of(TARGET, plan)
    parts, truth = Parts(abstract(plan, 8)), {True: 0.0, False: 0.0}
    for times, sent in ((found.microbatches, found.sent), (1, found.sent_once)):
        for one in sent:
            link = link_along(TARGET, parts, one.axes, rates)
            hops = (parts.size(one.axes) - 1) * one.times
            truth[one.hidden] += times * (hops * link.latency_s + one.bytes / link.bytes_per_s)
    assert found.microbatches > 1
    assert found.seconds.beside == pytest.approx(truth[True])
    assert found.seconds.waited == pytest.approx(truth[False])


@pytest.mark.catches("sums-of-gradients-are-free")
@pytest.mark.catches("updates-are-free")
def test_updates_and_sums_of_gradients_take_their_bytes():
    config = recipe("llama_tiny")
    profile = profile_task(task_of(config), Plan(), TARGET)
    learned = sum(info.shape[0] * _rest(info.shape) for info in profile.infos)

    def memory(mesh, accumulation, rules="zero3"):
        plan = preset(rules, mesh=mesh).replace(batch=BatchConfig(accumulation=accumulation))
        rates = dataclasses.replace(rates_of(TARGET, plan), memory=1.0)
        return predict(profile, plan, TARGET, rates).seconds.memory

    # A parameter and two moments in float32, read and written, and a gradient that is read.
    assert memory({"data": 8}, 1) == 28 * learned
    assert memory({"fsdp": 8}, 1) == memory({"fsdp": 8}, 1, "zero2") == 28 * learned / 8
    # Sums that are read and written, and what is added.
    assert memory({"data": 8}, 3) == (28 + 3 * 12) * learned
    assert memory({"fsdp": 8}, 3) == (28 + 3 * 12) * learned / 8


def _rest(shape):
    return 1 if len(shape) == 1 else shape[1] * _rest(shape[1:])


def test_of_plans_that_compute_alike_that_with_fewer_microbatches_is_faster():
    config, target = recipe("llama_tiny"), parse_target("h100:1x1")
    profile = profile_task(task_of(config), Plan(), target)
    best = search(profile, Plan(), target, room=70e9).candidates[0]
    assert best.predicted.microbatches == 1


@pytest.mark.catches("the-smallest-has-no-turn")
def test_what_needs_least_is_compiled_before_all_is_refused(monkeypatch):
    config = recipe("llama_tiny")
    profile = profile_task(task_of(config), Plan(), TARGET)
    budget = 6e6
    candidates = search(profile, Plan(), TARGET, room=budget).candidates
    least = min(candidates, key=lambda one: one.predicted.bytes.total)
    assert least not in candidates[:6]

    def compiled(subject, plans, target, processes):
        factors = [1.0 if plan == least.plan else 10.0 for plan in plans]
        sizes = [predict(profile, plan, target).bytes.total for plan in plans]
        totals = [factor * size for factor, size in zip(factors, sizes, strict=True)]
        facts = {"collectives": [], "host_bytes": 0}
        return [{"device_bytes": {"total": one, "terms": {}}, **facts} for one in totals]

    monkeypatch.setattr(planned, "compiled", compiled)
    monkeypatch.setattr(planned, "profile_task", lambda *_: profile)
    monkeypatch.setattr(planned, "target_devices", lambda _: [])
    answer = plan_run(
        Subject.of(config), Plan(), TARGET, top=1, device_gb=budget / 1e9, processes=1
    )
    assert answer.plans[0].plan == least.plan


@pytest.mark.catches("gradients-divided-twice")
@pytest.mark.parametrize(
    ("name", "mesh", "rules"),
    [
        ("llama_tiny", {"data": 4, "tensor": 2}, "zero3+megatron_sp"),
        ("moe_tiny", {"data": 2, "expert": 4}, "zero3"),
        ("moe_tiny", {"data": 2, "fsdp": 2, "expert": 2}, "zero3"),
    ],
)
def test_sums_over_data_are_of_all_that_a_device_holds(name, mesh, rules):
    config = recipe(name)
    profile = profile_task(task_of(config), Plan(), TARGET)
    plan, truth = preset(rules, mesh=mesh), 0.0
    bound = abstract(plan, 8)
    for info in profile.infos:
        spec = resolve(bound, "gradients", info.dims, info.shape)
        parts = math.prod(mesh.get(axis, 1) for axis in jax.tree.leaves(tuple(spec)))
        # Devices along these hold the same tokens' experts, or other tokens of the same matrix.
        others = [a for a in ("data", "fsdp", "expert") if a not in jax.tree.leaves(tuple(spec))]
        ways = math.prod(mesh.get(axis, 1) for axis in others)
        truth += 2 * (ways - 1) / ways * math.prod(info.shape) / parts * 4
    sent = predict(profile, plan, TARGET).sent
    found = sum(one.bytes for one in sent if one.kind == "all-reduce" and "data" in one.axes)
    assert found == pytest.approx(truth, rel=1e-6)
