"""Where nothing fits: what is said to do does, and less does not."""

import dataclasses

import pytest

from colossax.aot import parse_target
from colossax.errors import PlanError
from colossax.planner.profiling import profile_task
from colossax.planner.searching import Subject, plan_run, planned, smallest
from colossax.planner.searching.asked import NOTHING_ASKED, Asked
from colossax.planner.searching.search import search
from colossax.recipes import recipe
from colossax.tasks import task_of


@pytest.fixture(scope="module")
def llama():
    """Llama 3 8B, read once."""
    config = recipe("llama3_8b")
    return config, profile_task(task_of(config), config.plan, parse_target("h100:1x8"))


def fits(profile, plan, target, room, asked=NOTHING_ASKED):
    try:
        return bool(search(profile, plan, target, room=room, asked=asked).candidates)
    except PlanError:
        return False


@pytest.mark.catches("more-gpus-than-it-takes")
@pytest.mark.parametrize(
    ("target", "room", "rows"),
    [
        ("h100:1x1", 70e9, 64),
        *(
            pytest.param(*case, marks=pytest.mark.sweep)
            for case in [
                ("h100:1x1", 20e9, 64),
                ("h100:1x2", 12e9, 96),
                ("h100:1x8", 6e9, 96),
                ("h100:2x4", 10e9, 60),
                ("h100:1x6", 1e9, 96),
            ]
        ),
    ],
)
def test_the_fewest_gpus_are_the_first_of_all_that_fit(llama, monkeypatch, target, room, rows):
    config, profile = llama
    monkeypatch.setattr(smallest, "MAX_DEVICES", 8 if room == 70e9 else 48)
    profile, target = dataclasses.replace(profile, rows=rows), parse_target(target)
    found = smallest.smallest_target(profile, config.plan, target, room=room, asked=NOTHING_ASKED)
    one_by_one = [one for one in smallest.larger(target) if fits(profile, config.plan, one, room)]
    assert found == (one_by_one[0] if one_by_one else None)


def test_larger_targets_fill_a_node_first():
    names = [one.name for one in smallest.larger(parse_target("a100:1x6"))]
    assert names[:4] == ["a100_80:1x7", "a100_80:1x8", "a100_80:2x8", "a100_80:3x8"]
    assert names[-1] == "a100_80:128x8"
    assert smallest.larger(parse_target("h100:2x4@roce"))[0].name == "h100:3x4@roce"
    assert smallest.larger(parse_target("h100:128x8")) == []


@pytest.mark.catches("a-budget-that-does-not-do")
def test_the_least_budget_does_and_less_does_not(llama):
    config, profile = llama
    target = parse_target("h100:1x8")
    found = search(profile, config.plan, target, room=10e9)
    assert not found.candidates
    enough = smallest.smallest_gb(found.smallest)
    assert fits(profile, config.plan, target, enough * 1e9)
    assert not fits(profile, config.plan, target, (enough - 0.1) * 1e9)


@pytest.mark.parametrize(
    ("target", "device_gb", "said"),
    [
        ("h100:1x1", None, r"; give h100:1x2 \(the fewest of these GPUs that fit it by formula\),"),
        (
            "h100:1x1",
            None,
            r"GPUs of which it may take 1\d\d\.\d GB \(the least that fits it by formula\), --ho",
        ),
        (
            "h100:1x8",
            10.0,
            r"--device-gb 1\d\.\d \(the least that fits it by formula\), --host-gb 1",
        ),
        (
            "h100:1x1",
            0.05,
            r"; no number of them up to 1024 fits it by formula; give GPUs of which",
        ),
    ],
)
def test_the_refusal_says_what_would_do(llama, monkeypatch, target, device_gb, said):
    config, profile = llama
    monkeypatch.setattr(planned, "profile_task", lambda *_: profile)
    target = parse_target(target)
    with pytest.raises(PlanError, match=said):
        plan_run(Subject.of(config), config.plan, target, device_gb=device_gb, verify=False)


@pytest.mark.slow
def test_what_is_asked_for_holds_on_more_gpus_too(llama):
    config, profile = llama
    asked, target = Asked(sizes={"fsdp": 8}), parse_target("h100:1x8")
    assert not fits(profile, config.plan, target, 12e9, asked)
    found = smallest.smallest_target(profile, config.plan, target, room=12e9, asked=asked)
    assert found is None or fits(profile, config.plan, found, 12e9, asked)
