"""The time line of a step: what it is made of is all of its seconds, and nothing overlaps."""

import dataclasses
import itertools

import pytest

from colossax.aot import parse_target
from colossax.planner.profiling import profile_task
from colossax.planner.searching import asked_of
from colossax.planner.searching.islands import search_islands
from colossax.planner.searching.planned import Planned, answer_of
from colossax.planner.searching.search import search
from colossax.planner.telling import plan_plot
from colossax.planner.telling.plan_plot import plot_plans
from colossax.planner.telling.time_line import (
    BACKWARD,
    BESIDE,
    COMPUTE,
    EXPOSED,
    FILE,
    FORWARD,
    HOST,
    UPDATES,
    WAITED,
    gaps,
    time_line,
)
from colossax.recipes import recipe
from colossax.tasks import task_of

NODE = parse_target("h100:1x8")


@pytest.fixture(scope="module")
def tiny():
    config = recipe("llama_tiny")
    return config, profile_task(task_of(config), config.plan, NODE)


def found(tiny, *pins):
    config, profile = tiny
    asked = asked_of([*pins, "ring=1", "ulysses=1"], [])
    one = search(profile, config.plan, NODE, room=1e9, asked=asked).candidates[0]
    return Planned(candidate=one, seconds=one.predicted.seconds, found=None)


def apart(line):
    """Bars of a row, one behind the other."""
    for row in range(len(line.rows)):
        own = sorted((b.start, b.start + b.seconds) for b in line.bars if b.row == row)
        assert all(a[1] <= b[0] + 1e-9 * line.end for a, b in itertools.pairwise(own))


def total(line, kind, row=None):
    return sum(b.seconds for b in line.bars if b.kind == kind and row in (None, b.row))


@pytest.mark.catches("transfers-are-not-drawn")
@pytest.mark.catches("files-are-not-drawn")
@pytest.mark.catches("a-time-line-lasts-longer")
def test_a_step_without_stages_is_all_of_its_seconds(tiny):
    one = found(tiny, "fsdp=4", "tensor=2")
    compute = one.seconds.compute
    seconds = dataclasses.replace(
        one.seconds, beside=1.5 * compute, bus=0.3 * compute, disk=compute
    )
    one = dataclasses.replace(one, seconds=seconds)
    line = time_line(one)
    apart(line)
    assert line.end == pytest.approx(seconds.total)
    assert line.rows == ("device", "links")
    assert total(line, WAITED) == pytest.approx(seconds.waited) and seconds.waited > 0
    assert total(line, EXPOSED) == pytest.approx(seconds.exposed) and seconds.exposed > 0
    assert total(line, BESIDE) == pytest.approx(seconds.beside - seconds.exposed)
    assert total(line, HOST) == pytest.approx(seconds.bus)
    assert total(line, FILE) == pytest.approx(seconds.disk)
    assert gaps(line, 0) == pytest.approx(0, abs=1e-9 * line.end)
    alone = dataclasses.replace(seconds, waited=0.0, beside=0.0, bus=0.0, disk=0.0)
    line = time_line(dataclasses.replace(one, seconds=alone))
    assert line.rows == ("device",)
    assert line.kinds == (COMPUTE, UPDATES)


@pytest.mark.catches("a-bubble-is-not-seen")
def test_stages_have_their_bubble(tiny):
    one = found(tiny, "stage=4", "data=2")
    count = one.candidate.predicted.microbatches
    line = time_line(one)
    apart(line)
    assert line.end == pytest.approx(one.seconds.total)
    assert line.rows == ("stage 0", "stage 1", "stage 2", "stage 3")
    of_slots = one.seconds.total - one.seconds.memory
    chunks = one.plan.pipeline.chunks
    runs = count + 3 if chunks == 1 else count * chunks + 3
    for row in range(4):
        done = total(line, FORWARD, row) + total(line, BACKWARD, row)
        assert done == pytest.approx(of_slots * count * chunks / runs, rel=0.05)
        assert gaps(line, row) > 0
        assert total(line, UPDATES, row) == pytest.approx(one.seconds.memory)
    assert line.kinds == (FORWARD, BACKWARD, UPDATES)
    moves = dataclasses.replace(one.seconds, bus=0.5 * one.seconds.total)
    moved = time_line(dataclasses.replace(one, seconds=moves))
    apart(moved)
    assert moved.end == pytest.approx(moves.total)
    for row in range(4):  # transfers are behind the slots, and not in them
        assert total(moved, HOST, row) == pytest.approx(moves.bus)
        assert total(moved, FORWARD, row) == pytest.approx(total(line, FORWARD, row))


def test_stages_of_islands_take_what_they_take(tiny):
    config, profile = tiny
    target = parse_target("h100:1x4+a100:1x4")
    asked = asked_of(["stage=2", "fsdp=4"], [])
    candidates, _ = search_islands(profile, config.plan, target, rooms=[1e9, 1e9], asked=asked)
    one, _ = candidates[0]
    line = time_line(Planned(candidate=one, seconds=one.predicted.seconds, found=None))
    apart(line)
    assert line.end == pytest.approx(one.predicted.seconds.total)
    done = [total(line, FORWARD, row) + total(line, BACKWARD, row) for row in range(2)]
    slow, fast = one.predicted.stage_s
    assert done[0] / done[1] == pytest.approx(slow / fast)


@pytest.mark.catches("the-time-line-is-not-drawn")
def test_it_is_drawn_below_the_bars(tiny, tmp_path, monkeypatch):
    drawn = []
    whole, stacked = plan_plot._draw, []
    monkeypatch.setattr(plan_plot, "stack_bars", lambda *given, **_: stacked.append(given[2]))

    def draw(axes, line):
        whole(axes, line)
        drawn.append((axes, line))

    monkeypatch.setattr(plan_plot, "_draw", draw)
    one = found(tiny, "stage=4", "data=2")
    plot_plans(answer_of([one], 1, 0, 1e9, ""), tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    # Of what takes nothing there is neither a bar nor a word.
    assert all(any(each) for bars in stacked for each in bars.values())
    assert len(stacked) == 2
    ((axes, line),) = drawn
    assert [label.get_text() for label in axes.get_yticklabels()] == list(line.rows)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == list(line.kinds)
    assert sum(len(each.get_paths()) for each in axes.collections) == len(line.bars)
