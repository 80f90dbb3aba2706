"""Every schedule at every size can run, and takes and keeps as little as it says."""

import itertools
import math

import pytest

from colossax.errors import PlanError
from colossax.pipeline import (
    FORMS,
    SCHEDULES,
    Costs,
    Kind,
    checked,
    movable,
    schedule,
    simulate,
)
from tests.pipeline.interpreter import runs

STAGES = (1, 2, 3, 4, 6)
MICROBATCHES = (1, 2, 3, 5, 8, 13)
ALL = [(name, form) for name in SCHEDULES for form in FORMS]
FLAT = [one for one in ALL if one[0] != "gpipe"]


def chunks_of(name):
    return {"interleaved": (2, 3), "zb_v": (2,)}.get(name, (1,))


def sizes(name, stages=STAGES, microbatches=MICROBATCHES):
    return itertools.product(stages, microbatches, chunks_of(name))


@pytest.mark.parametrize(("name", "form"), ALL)
@pytest.mark.catches("weights-before-their-input")
@pytest.mark.catches("schedule-sends-too-early")
def test_every_table_can_run_on_neighbours(name, form):
    for stages, microbatches, chunks in sizes(name):
        table = movable(checked(schedule(name, stages, microbatches, chunks, form)))
        assert (table.stages, table.microbatches, table.chunks) == (stages, microbatches, chunks)
        assert all(any(cells) for cells in table.ticks)
        assert runs(table)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.catches("groups-smaller-than-the-stages")
@pytest.mark.catches("weights-in-vain")
def test_lock_step_runs_no_more_than_it_must(name):
    """Masked work included: (M + P - 1) / M, interleaved (vM + P - 1) / (vM); weights once."""
    for p, m, v in sizes(name):
        executed = simulate(schedule(name, p, m, v)).executed
        ticks = m + p - 1
        if name == "interleaved":
            ticks = v * m + p - 1 if m >= p else (v - 1) * p + m + p - 1
        if name == "zb_v":
            ticks = 2 * (m + p - 1)
        split = name.startswith("zb")
        assert executed == {
            Kind.FORWARD: ticks,
            Kind.BACKWARD: 0 if split else ticks,
            Kind.INPUT: ticks if split else 0,
            Kind.WEIGHT: v * m if split else 0,
        }


def test_ticks():
    for p, m in itertools.product(STAGES, MICROBATCHES):
        assert len(schedule("gpipe", p, m).ticks) == 2 * (m + p - 1)
        assert len(schedule("1f1b", p, m).ticks) == m + 2 * p - 2
        assert len(schedule("zb_h1", p, m).ticks) == m + 2 * p - 2
        assert len(schedule("zb_v", p, m).ticks) == 2 * m + 4 * p - 3


@pytest.mark.catches("one-f-one-b-keeps-one-more")
def test_saved_inputs_are_what_the_schedules_say():
    for p, v in itertools.product(STAGES, (2, 3)):
        m = 2 * p
        by_stage = range(p)
        assert saved("gpipe", p, m) == (m,) * p
        assert saved("1f1b", p, m) == tuple(2 * (p - 1 - s) + 1 for s in by_stage)
        assert saved("1f1b", p, m, form="free") == tuple(p - s for s in by_stage)
        assert saved("zb_h1", p, m) == saved("1f1b", p, m)
        assert saved("zb_v", p, m) == saved("zb_v", p, m, form="free") == (2 * p,) * p
        rounds = tuple((v - 1) * p + 2 * (p - 1 - s) + 1 for s in by_stage)
        assert saved("interleaved", p, m, v) == rounds


@pytest.mark.catches("zero-bubble-keeps-more")
def test_what_waits_for_weight_gradients():
    """Free, no stage keeps more than the first of 1F1B."""
    for p in STAGES:
        m = 2 * p
        lockstep = simulate(schedule("zb_h1", p, m))
        assert lockstep.pending == tuple(s + 1 for s in range(p))
        assert max(lockstep.kept) == 2 * p - 1
        assert max(simulate(schedule("zb_v", p, m)).kept) <= 3 * p
        assert simulate(schedule("zb_h1", p, m, form="free"), form="free").kept == (p,) * p
        assert simulate(schedule("zb_v", p, m, form="free"), form="free").kept == (2 * p,) * p


def saved(name, stages, microbatches, chunks=None, form="lockstep"):
    return simulate(schedule(name, stages, microbatches, chunks, form), form=form).saved


@pytest.mark.parametrize(("name", "form"), FLAT)
def test_what_is_kept_does_not_grow_with_microbatches(name, form):
    for chunks in chunks_of(name):
        few, many = (
            simulate(schedule(name, 4, microbatches, chunks, form), form=form)
            for microbatches in (8, 64)
        )
        assert (few.saved, few.pending, few.kept) == (many.saved, many.pending, many.kept)


def test_odd_numbers_of_microbatches_cost_interleaved_few_inputs():
    """Groups grow by what is over, shared among them."""
    for microbatches in range(8, 65, 5):
        assert max(saved("interleaved", 4, microbatches, 2)) <= 11 + -(-3 // (microbatches // 4))


PAPERS = {
    "gpipe": lambda f, i, w: f + i + w,
    "1f1b": lambda f, i, w: f + i + w,
    "interleaved": lambda f, i, w: (f + i + w) / 2,
    "zb_h1": lambda f, i, w: f + i - w,
}


@pytest.mark.parametrize("name", PAPERS)
@pytest.mark.catches("zb-h1-weights-at-the-end")
def test_free_bubbles_are_those_of_the_papers(name):
    costs = [(1, 1, 1), (2, 3, 1), (1, 1.25, 0.5), (3, 1, 1)]
    for (p, m), (f, i, w) in itertools.product([(2, 4), (4, 8), (4, 16), (8, 16)], costs):
        table = schedule(name, p, m, 2 if name == "interleaved" else None, "free")
        found = simulate(table, Costs(forward=f, input=i, weight=w), "free")
        assert math.isclose(found.time - m * (f + i + w), (p - 1) * PAPERS[name](f, i, w))


@pytest.mark.catches("zb-v-order")
def test_zb_v_hardly_waits():
    """At F = I = W: at most half of 1F1B's bubble, and none but before the first operation."""
    for p, m in [(2, 3), (4, 7), (4, 8), (4, 32), (8, 15), (8, 32)]:
        v, plain = (simulate(schedule(n, p, m, form="free"), form="free") for n in ("zb_v", "1f1b"))
        assert v.bubble <= plain.bubble / 2
        assert v.time - 3 * m == (p - 1) / 2
    for p, m in [(2, 1), (4, 2), (4, 5), (8, 9)]:
        v, plain = (simulate(schedule(n, p, m, form="free"), form="free") for n in ("zb_v", "1f1b"))
        assert v.time < plain.time


def test_zb_v_in_lock_step_saves_a_third_of_the_bubble():
    v, plain = (simulate(schedule(name, 4, 8)) for name in ("zb_v", "1f1b"))
    assert (plain.time - 24, v.time - 24) == (9, 6)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (("1f1", 4, 8), "pipeline.schedule: unknown '1f1'; did you mean '1f1b'"),
        (("1f1b", 4, 8, 1, "lock"), "pipeline.schedule: unknown 'lock'; did you mean 'lockstep'"),
        (
            ("interleaved", 4, 8),
            "'interleaved' needs 2 or more chunks on each stage, and found non",
        ),
        (("interleaved", 4, 8, 1), "'interleaved' needs 2 or more chunks .* found 1; give pipelin"),
        (("1f1b", 4, 8, 2), "pipeline.chunks: '1f1b' has 1 on each stage, and found 2; leave it"),
        (("zb_v", 4, 8, 3), "pipeline.chunks: 'zb_v' has 2 on each stage, and found 3; leave it"),
        (("gpipe", 0, 8), "pipeline.stages: found 0; give 1 or more"),
        (("gpipe", 4, 0), "pipeline.microbatches: found 0; give 1 or more"),
    ],
)
def test_refusals(given, sentence):
    with pytest.raises(PlanError, match=sentence):
        schedule(*given)
