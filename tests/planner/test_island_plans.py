"""Plans for several kinds of nodes: layers shared by speed and room, stages across islands."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest

from colossax.aot import parse_target
from colossax.cli import main
from colossax.config import Plan
from colossax.errors import PlanError
from colossax.pipeline import Costs, schedule, simulate
from colossax.planner.profiling import profile_task
from colossax.planner.searching import Subject, asked_of, islands_planned, plan_run
from colossax.planner.searching.islands import search_islands
from colossax.planner.searching.sharing import StageCost, share_layers, step_seconds
from colossax.recipes import recipe
from colossax.tasks import task_of

TARGET = parse_target("h100:1x4+a100:1x4")
ROOMS = [76e9, 76e9]


@pytest.fixture(scope="module")
def llama():
    """Llama 3 8B with 64 rows, read once."""
    config = recipe("llama3_8b")
    config = config.replace(data=dataclasses.replace(config.data, global_batch=64))
    return config, profile_task(task_of(config), config.plan, TARGET.apart[0])


@pytest.fixture(scope="module")
def tiny():
    config = recipe("llama_tiny")
    return config, profile_task(task_of(config), config.plan, TARGET.apart[0])


def brute(stages, layers):
    """The least that the slowest stage takes, of all ways to share; infinite where none fits."""
    best = math.inf
    for cuts in itertools.product(range(1, layers + 1), repeat=len(stages)):
        fits = all(n <= one.most for n, one in zip(cuts, stages, strict=True))
        if sum(cuts) == layers and fits:
            slowest = max(one.seconds(n) for n, one in zip(cuts, stages, strict=True))
            best = min(best, slowest)
    return best


@pytest.mark.catches("layers-are-shared-evenly")
def test_layers_are_shared_as_all_ways_to_share_them_say():
    random = np.random.default_rng(0)
    refused = 0
    for layers, count in itertools.product(range(1, 13), range(1, 5)):
        for _ in range(2):
            stages = [
                StageCost(
                    layer_s=float(random.uniform(0.5, 3)),
                    rest_s=float(random.uniform(0, 4)),
                    most=int(random.integers(1, 13)),
                )
                for _ in range(count)
            ]
            found, least = share_layers(stages, layers), brute(stages, layers)
            if found is None:
                refused += 1
                assert least == math.inf
                continue
            assert sum(found) == layers and min(found) >= 1
            assert all(n <= one.most for n, one in zip(found, stages, strict=True))
            slowest = max(one.seconds(n) for n, one in zip(found, stages, strict=True))
            assert slowest == pytest.approx(least)
    assert refused > 10


def test_where_speeds_differ_by_two_a_step_is_a_third_faster():
    for stages in (2, 4, 8):
        costs = [
            StageCost(layer_s=1.0 + (at >= stages // 2), rest_s=0.0, most=64)
            for at in range(stages)
        ]
        cuts = share_layers(costs, 64)
        even = step_seconds([one.seconds(64 // stages) for one in costs], [0.0] * stages, 64)
        found = step_seconds(
            [one.seconds(n) for one, n in zip(costs, cuts, strict=True)], [0.0] * stages, 64
        )
        assert even / found >= 1.3


@pytest.mark.catches("hops-are-free")
def test_a_step_takes_what_its_schedule_takes():
    random = np.random.default_rng(1)
    for stages, microbatches in ((1, 3), (2, 5), (3, 12), (4, 4), (4, 32)):
        for hop in (0.0, 0.2, 2.0):
            seconds = [float(one) for one in random.uniform(1, 3, stages)]
            forward = tuple(one / 3 for one in seconds)
            costs = Costs(forward=forward, input=forward, weight=forward, transfer=hop)
            table = schedule("1f1b", stages, microbatches, 1, "free")
            truth = simulate(table, costs, "free").time
            said = step_seconds(seconds, [hop] * (stages - 1), microbatches)
            assert truth * 0.85 <= said <= truth * 1.15


@pytest.mark.catches("one-speed-for-all-islands")
def test_faster_gpus_have_more_layers_and_the_step_is_faster_for_it(llama):
    config, profile = llama
    asked = asked_of([], ["ring", "ulysses"])
    found, scored = search_islands(profile, config.plan, TARGET, rooms=ROOMS, asked=asked)
    best, layout = found[0]
    assert scored > len(found) > 5
    islands = [TARGET.islands[at].gpu.key for at in layout.order]
    cuts = dict(zip(islands, best.plan.pipeline.cuts, strict=True))
    assert cuts["h100"] > 2 * cuts["a100_80"]
    assert sum(best.plan.pipeline.cuts) == 32
    assert best.predicted.even_s / best.predicted.seconds.total >= 1.3
    for one, each in found:
        assert one.plan.mesh_sizes(8)["stage"] == len(each.order) == len(one.plan.pipeline.cuts)
        pairs = zip(one.predicted.stages, each.order, strict=True)
        assert all(size <= ROOMS[at] for size, at in pairs)


@pytest.mark.catches("stages-hold-what-others-need")
def test_bytes_of_stages_are_those_of_compiled_programs(llama):
    """26.49 and 18.94 GiB, compiled: 20 and 12 layers over fsdp 4, a row at a time, all
    recomputed, logits whole (2.1 GiB that chunks do not keep)."""
    config, profile = llama
    asked = asked_of(["fsdp=4", "stage=2"], [])
    found, _ = search_islands(profile, config.plan, TARGET, rooms=ROOMS, asked=asked)
    layout = next(each for _, each in found if each.order == (0, 1))
    tokens = layout.each[0].tokens(1)
    for at, layers, compiled in ((0, 20, 26.49), (1, 12, 18.94 - 2.1 + 2.0)):
        fixed, layer = layout._bytes(at, frozenset(), tokens, 16, 8)
        total = fixed.total + layers * layer.total
        assert total / 2**30 == pytest.approx(compiled, rel=0.02)


@pytest.mark.catches("memory-of-one-island-is-that-of-all")
def test_an_island_with_little_memory_has_fewer_layers(llama):
    config, profile = llama
    asked = asked_of(["fsdp=4", "stage=2"], [])
    found, _ = search_islands(profile, config.plan, TARGET, rooms=[30e9, 76e9], asked=asked)
    for one, layout in found:
        size = dict(zip(layout.order, one.predicted.stages, strict=True))
        assert size[0] <= 30e9
    best, layout = found[0]
    cuts = dict(zip(layout.order, best.plan.pipeline.cuts, strict=True))
    assert cuts[0] < 26


@pytest.mark.catches("islands-in-another-order-are-not-told")
def test_stages_may_begin_on_another_island(llama):
    """The plan says whose devices each stage has, as `bind` and `inspect` read it."""
    config, profile = llama
    asked = asked_of(["fsdp=2", "stage=4"], [])
    found, _ = search_islands(profile, config.plan, TARGET, rooms=ROOMS, asked=asked)
    orders = {one.plan.pipeline.order for one, _ in found}
    assert orders == {None, (2, 3, 0, 1)}
    one, layout = next(each for each in found if each[0].plan.pipeline.order)
    assert layout.order == (1, 1, 0, 0)
    assert "on a100_80" in one.words.split("on h100")[0]


@pytest.mark.catches("islands-cannot-be-told")
def test_the_command_plans_for_islands(capsys, tmp_path):
    path = tmp_path / "plan.json"
    words = ["plan", "llama_tiny", "--target", "h100:1x2+a100:1x2", "--no-compile"]
    words += ["--pin", "stage=2", "--forbid", "ring", "--forbid", "ulysses"]
    plot = tmp_path / "plan.png"
    assert main([*words, "--json", "--out", str(path), "--plot", str(plot)]) == 0
    said = json.loads(capsys.readouterr().out)
    plan = Plan.from_json(said["plans"][0]["plan"])
    assert Plan.from_json(path.read_text("utf-8")) == plan
    assert plan.mesh["stage"] == 2 and sum(plan.pipeline.cuts) == 4
    told = said["plans"][0]["label"]
    assert "layers on " in told and "h100" in told and "a100_80" in told
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert main(words) == 0
    assert "layers on " in capsys.readouterr().out.splitlines()[0]


def planned(config, target=TARGET, **options):
    return plan_run(Subject.of(config), config.plan, target, verify=False, **options)


@pytest.mark.catches("islands-need-no-stages")
def test_what_islands_cannot_have_is_refused(monkeypatch, tiny):
    monkeypatch.setattr(islands_planned, "profile_task", lambda *_: tiny[1])
    with pytest.raises(PlanError) as refused:
        planned(tiny[0], asked=asked_of([], ["stage"]))
    assert str(refused.value) == (
        "plan: target 'h100:1x4+a100_80:1x4' is made of 2 islands, which stages alone may cross,"
        " and there is 1; allow as many stages as islands or more, or give one of them, as"
        " --target h100:1x4"
    )
    with pytest.raises(PlanError, match="no mesh of as many devices of each island of 'h100:1x4"):
        planned(tiny[0], asked=asked_of(["stage=3"], []))
    kinds = dataclasses.replace(tiny[1], staged=False)
    monkeypatch.setattr(islands_planned, "profile_task", lambda *_: kinds)
    with pytest.raises(PlanError, match="this model's layers are not of one kind that stages coul"):
        planned(tiny[0])


@pytest.mark.catches("islands-say-no-way-out")
def test_where_nothing_fits_what_would_do_is_found(monkeypatch, llama):
    monkeypatch.setattr(islands_planned, "profile_task", lambda *_: llama[1])
    asked = asked_of(["stage=2", "fsdp=4"], [])
    with pytest.raises(PlanError) as refused:
        planned(llama[0], device_gb=12.0, asked=asked)
    said = str(refused.value)
    assert said.startswith(
        "plan: nothing that is searched fits 11.2 GiB of each NVIDIA H100 80GB HBM3 and 11.2 GiB of"
        " each NVIDIA A100-SXM4-80GB, on 'h100:1x4+a100_80:1x4'; by formula these would do:"
    )
    enough = float(said.split("--device-gb ")[1].split(" ")[0])
    assert planned(llama[0], device_gb=enough, asked=asked).plans
    with pytest.raises(PlanError):
        planned(llama[0], device_gb=enough - 0.3, asked=asked)


@pytest.mark.catches("islands-over-budget")
@pytest.mark.catches("layers-are-not-shared-anew")
def test_what_is_compiled_is_held_against_the_room_of_its_stage(monkeypatch, tiny, llama):
    """The second stage's programs need as much, whatever its layers are."""
    seen = []

    def compiled(subject, plans, target, processes):
        seen.extend(plans)
        return [
            {
                "device_bytes": {"total": 3e9, "terms": {}},
                "stages": [{"device_bytes": 1e7}, {"device_bytes": more[len(seen) > 1]}],
                "collectives": [],
            }
            for _ in plans
        ]

    monkeypatch.setattr(islands_planned, "profile_task", lambda *_: tiny[1])
    monkeypatch.setattr(islands_planned, "compiled", compiled)
    monkeypatch.setattr(islands_planned, "target_devices", lambda _: None)
    asked = asked_of(["stage=2", "fsdp=4"], [])
    given = {"asked": asked, "device_gb": 2.0, "top": 1}
    more = [1e9, 1e9]
    answer = plan_run(Subject.of(tiny[0]), tiny[0].plan, TARGET, **given)
    assert answer.plans[0].found is not None
    more = [2.5e9, 2.5e9]
    with pytest.raises(PlanError, match="2 were tried and 2 compiled"):
        plan_run(Subject.of(tiny[0]), tiny[0].plan, TARGET, **given)
    # What the second stage has too much the first may take.
    monkeypatch.setattr(islands_planned, "profile_task", lambda *_: llama[1])
    more, seen[:] = [84e9, 60e9], []
    answer = plan_run(Subject.of(llama[0]), llama[0].plan, TARGET, asked=asked, top=1)
    assert [plan.mesh for plan in seen] == [seen[0].mesh] * 2
    assert seen[0].pipeline.cuts[1] > seen[1].pipeline.cuts[1]
    assert answer.plans[0].found is not None
