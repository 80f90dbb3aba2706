"""A table as arrays: followed blindly, they give what the table says."""

import numpy as np
import pytest

from colossax.errors import PlanError
from colossax.pipeline import schedule
from colossax.pipeline.routes import forward_alone, routes_of

TABLES = [
    ("gpipe", 3, 4, 1),
    ("1f1b", 1, 2, 1),
    ("1f1b", 4, 2, 1),
    ("1f1b", 4, 9, 1),
    ("interleaved", 2, 5, 2),
    ("interleaved", 4, 3, 2),
    ("interleaved", 4, 12, 3),
]


def followed(routes, stages, chunks):
    """What reaches the loss, and what comes back: for each, who has touched it, in order.

    Values are tuples; slots are written and read as an executor does, whoever needs them.
    """
    ahead, back = routes.forward, routes.backward
    arrived = [[None] * stages for _ in range(routes.waiting)]
    returned = [[None] * stages for _ in range(routes.returning)]
    turned = [None] * routes.turning
    kept = [[None] * stages for _ in range(routes.kept)]
    ends, returns = {}, {}
    for tick in range(len(routes.ends)):
        out, before = [None] * stages, [None] * stages
        for s in range(stages):
            here = arrived[ahead.source[tick, s] % routes.waiting][s]
            if s == 0 and ahead.chunk[tick, s] == 0:
                here = (routes.enters[tick],)
            if ahead.active[tick, s]:
                assert here[0] == ahead.microbatch[tick, s]
                out[s] = (*here, ("f", s, ahead.chunk[tick, s]))
        kept[tick % routes.kept] = out
        if routes.ends[tick] >= 0:
            ends[routes.ends[tick]] = turned[tick % routes.turning] = out[-1]
        for s in range(stages):
            if not back.active[tick, s]:
                continue
            by = returned[back.source[tick, s] % routes.returning][s]
            if s == stages - 1 and back.chunk[tick, s] == chunks - 1:
                by = turned[routes.turns[tick] % routes.turning]
            own = kept[back.forward[tick, s] % routes.kept][s]
            assert own[0] == by[0] == back.microbatch[tick, s]
            assert own[-1] == ("f", s, back.chunk[tick, s])
            before[s] = (*by, ("b", s, back.chunk[tick, s]))
        if routes.returns[tick] >= 0:
            returns[routes.returns[tick]] = before[0]
        arrived[tick % routes.waiting] = [out[s - 1] for s in range(stages)]
        returned[tick % routes.returning] = [before[(s + 1) % stages] for s in range(stages)]
    return ends, returns


@pytest.mark.catches("routes-too-few-slots")
@pytest.mark.catches("routes-of-another-tick")
@pytest.mark.parametrize(("name", "stages", "microbatches", "chunks"), TABLES)
def test_every_microbatch_goes_through_all_layers_and_back(name, stages, microbatches, chunks):
    routes = routes_of(schedule(name, stages, microbatches, chunks))
    ends, returns = followed(routes, stages, chunks)
    way = [(s, c) for c in range(chunks) for s in range(stages)]
    for m in range(microbatches):
        there = [("f", *place) for place in way]
        assert ends[m] == (m, *there)
        assert returns[m] == (m, *there, *[("b", *place) for place in reversed(way)])
    assert len(ends) == len(returns) == microbatches


@pytest.mark.parametrize(("name", "stages", "microbatches", "chunks"), TABLES)
def test_the_blocks_are_all_ticks_and_say_what_each_needs(name, stages, microbatches, chunks):
    routes = routes_of(schedule(name, stages, microbatches, chunks))
    ticks = [
        (phase.forward, phase.backward, phase.loss, phase.enters, phase.returns)
        for block in routes.blocks
        for _ in range(block.repeats)
        for phase in block.phases
        for _ in range(phase.stop - phase.start)
    ]
    forward, backward = routes.forward.active.any(axis=1), routes.backward.active.any(axis=1)
    outer = (routes.enters >= 0, routes.returns >= 0) if chunks == 1 else (forward, backward)
    needs = (forward, backward, routes.ends >= 0, *outer)
    assert ticks == list(zip(*needs, strict=True))


@pytest.mark.catches("routes-repeat-nothing")
@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved", 2), ("interleaved", 4)])
def test_what_repeats_is_said_once(name, chunks):
    sizes = [
        [len(block.phases) for block in routes_of(schedule(name, 4, count, chunks)).blocks]
        for count in (16, 64, 256)
    ]
    assert sizes[0] == sizes[1] == sizes[2]
    assert sum(sizes[0]) <= 6


def test_forward_passes_alone_end_with_the_last():
    table = forward_alone(schedule("1f1b", 4, 8))
    routes = routes_of(table)
    assert len(table.ticks) == 8 + 4 - 1
    assert not routes.backward.active.any() and routes.counted == 4
    assert np.array_equal(routes.forward_ticks[:, 0, :], np.arange(8)[:, None] + np.arange(4))


@pytest.mark.parametrize("name", ["zb_h1", "zb_v"])
def test_tables_that_the_executor_does_not_run_are_refused(name):
    with pytest.raises(PlanError, match="follow one another around|in two parts"):
        routes_of(schedule(name, 4, 8))
