"""A table as arrays: followed blindly, they give what the table says."""

import dataclasses

import numpy as np
import pytest

from colossax.errors import PlanError
from colossax.pipeline import Kind, Op, checked, schedule, simulate
from colossax.pipeline.routes import forward_alone, routes_of

TABLES = [
    ("gpipe", 3, 4, 1),
    ("1f1b", 1, 2, 1),
    ("1f1b", 4, 2, 1),
    ("1f1b", 4, 9, 1),
    ("interleaved", 2, 5, 2),
    ("interleaved", 4, 3, 2),
    ("interleaved", 4, 12, 3),
    ("zb_h1", 1, 3, 1),
    ("zb_h1", 2, 5, 1),
    ("zb_h1", 4, 2, 1),
    ("zb_h1", 4, 9, 1),
    ("zb_v", 2, 3, 2),
    ("zb_v", 3, 5, 2),
    ("zb_v", 4, 2, 2),
    ("zb_v", 4, 9, 2),
]


def followed(routes, stages):
    """What reaches the loss, what comes back, and what weights learn from.

    Values are tuples of who has touched them, in order; slots are written and read as an executor
    does, whoever needs them.
    """
    ahead, back, late = routes.forward, routes.backward, routes.weight
    arrived = [[[None] * stages for _ in range(count)] for count in routes.waiting]
    returned = [[[None] * stages for _ in range(count)] for count in routes.returning]
    turned = [None] * routes.turning
    kept, held = ([[None] * stages for _ in range(n)] for n in (routes.kept, routes.held))
    pending = [[None] * stages for _ in range(routes.pending)]
    ends, returns, learned = {}, {}, []
    chunks = len(routes.order)

    def read(rings, cells, tick, s):
        ring = rings[cells.way[tick, s]]
        return ring[cells.source[tick, s] % len(ring)][s]

    def send(rings, tick, values, sign):
        for ring, way in zip(rings, routes.ways, strict=True):
            ring[tick % len(ring)] = [values[(s - sign * way) % stages] for s in range(stages)]

    def place(cells, tick, s):
        chunk = cells.chunk[tick, s]
        return chunk * stages + routes.order[chunk, s]

    for tick in range(len(routes.ends)):
        out, before = [None] * stages, [None] * stages
        for s in range(stages):
            here = read(arrived, ahead, tick, s)
            if s == routes.first and ahead.chunk[tick, s] == 0:
                here = (routes.enters[tick],)
            if ahead.active[tick, s]:
                assert here[0] == ahead.microbatch[tick, s]
                out[s] = (*here, ("f", place(ahead, tick, s)))
        kept[tick % len(kept)] = held[tick % len(held)] = out
        if routes.ends[tick] >= 0:
            ends[routes.ends[tick]] = turned[tick % routes.turning] = out[routes.last]
        for s in range(stages):
            if not back.active[tick, s]:
                continue
            by = read(returned, back, tick, s)
            if s == routes.last and back.chunk[tick, s] == chunks - 1:
                by = turned[routes.turns[tick] % routes.turning]
            own = kept[back.forward[tick, s] % len(kept)][s]
            assert own[0] == by[0] == back.microbatch[tick, s]
            assert own[-1] == ("f", place(back, tick, s))
            before[s] = (*by, ("b", place(back, tick, s)))
        if routes.pending:
            pending[tick % routes.pending] = before
        for s in range(stages):
            if late.active[tick, s]:
                one = pending[late.source[tick, s] % routes.pending][s]
                assert one[0] == late.microbatch[tick, s]
                assert one[-1] == ("b", place(late, tick, s))
                assert held[late.forward[tick, s] % len(held)][s] == one[: one[-1][1] + 2]
                learned.append((one[0], one[-1][1]))
        if routes.returns[tick] >= 0:
            returns[routes.returns[tick]] = before[routes.first]
        send(arrived, tick, out, 1)
        send(returned, tick, before, -1)
    return ends, returns, learned


@pytest.mark.catches("routes-too-few-slots")
@pytest.mark.catches("routes-of-another-tick")
@pytest.mark.catches("routes-one-way")
@pytest.mark.parametrize(("name", "stages", "microbatches", "chunks"), TABLES)
def test_every_microbatch_goes_through_all_layers_and_back(name, stages, microbatches, chunks):
    routes = routes_of(schedule(name, stages, microbatches, chunks))
    ends, returns, learned = followed(routes, stages)
    way = range(stages * chunks)
    for m in range(microbatches):
        there = [("f", position) for position in way]
        assert ends[m] == (m, *there)
        assert returns[m] == (m, *there, *[("b", position) for position in reversed(way)])
    assert len(ends) == len(returns) == microbatches
    apart = name.startswith("zb")
    assert sorted(learned) == [(m, p) for m in range(microbatches) for p in way if apart]


@pytest.mark.parametrize(("name", "stages", "microbatches", "chunks"), TABLES)
def test_the_blocks_are_all_ticks_and_say_what_each_needs(name, stages, microbatches, chunks):
    routes = routes_of(schedule(name, stages, microbatches, chunks))
    ticks = [
        (phase.forward, phase.backward, phase.weight, phase.loss, phase.enters, phase.returns)
        for block in routes.blocks
        for _ in range(block.repeats)
        for phase in block.phases
        for _ in range(phase.stop - phase.start)
    ]
    cells = (routes.forward, routes.backward, routes.weight)
    works = [each.active.any(axis=1) for each in cells]
    outer = (routes.enters >= 0, routes.returns >= 0) if chunks == 1 else works[:2]
    assert ticks == list(zip(*works, routes.ends >= 0, *outer, strict=True))


@pytest.mark.catches("routes-repeat-nothing")
@pytest.mark.parametrize(
    ("name", "chunks"),
    [("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb_h1", 1), ("zb_v", 2)],
)
def test_what_repeats_is_said_once(name, chunks):
    sizes = [
        [len(block.phases) for block in routes_of(schedule(name, 4, count, chunks)).blocks]
        for count in (16, 64, 256)
    ]
    assert sizes[0] == sizes[1] == sizes[2]
    assert sum(sizes[0]) <= (11 if name == "zb_v" else 6)


def test_forward_passes_alone_end_with_the_last():
    table = forward_alone(schedule("1f1b", 4, 8))
    routes = routes_of(table)
    assert len(table.ticks) == 8 + 4 - 1
    assert not routes.backward.active.any() and routes.counted == 4
    assert np.array_equal(routes.forward_ticks[:, 0, :], np.arange(8)[:, None] + np.arange(4))


def test_whole_backward_passes_beside_others_in_parts_are_made_parts():
    table = schedule("1f1b", 2, 3)
    ticks = [
        [[part for op in cell for part in in_parts(op, apart=stage == 0)] for stage, cell in pairs]
        for pairs in map(enumerate, table.ticks)
    ]
    mixed = dataclasses.replace(table, ticks=tuple(tuple(map(tuple, cells)) for cells in ticks))
    _, _, learned = followed(routes_of(checked(mixed)), 2)
    assert sorted(learned) == [(m, p) for m in range(3) for p in range(2)]


def in_parts(op, *, apart):
    if op.kind is not Kind.BACKWARD or not apart:
        return [op]
    return [dataclasses.replace(op, kind=kind) for kind in (Kind.INPUT, Kind.WEIGHT)]


def changed(table, tick, stage, cell):
    ticks = [list(cells) for cells in table.ticks]
    ticks[tick][stage] = cell
    return dataclasses.replace(table, ticks=tuple(map(tuple, ticks)))


def test_tables_that_one_program_does_not_run_are_refused():
    round_ = schedule("interleaved", 2, 2, 2)
    blocks = dataclasses.replace(round_, layout=((0, 0), (0, 1), (1, 0), (1, 1)))
    with pytest.raises(PlanError, match="positions 0 and 1 are both on stage 0, and in one"):
        routes_of(blocks)
    far = dataclasses.replace(schedule("1f1b", 4, 1), layout=((0, 0), (2, 0), (1, 0), (3, 0)))
    with pytest.raises(PlanError, match="position 0 is on stage 0 and position 1 on stage 2"):
        routes_of(far)
    table = schedule("zb_h1", 2, 3)
    beside = changed(table, 2, 0, (Op(Kind.BACKWARD, 0), Op(Kind.WEIGHT, 1)))
    with pytest.raises(PlanError, match="tick 2, stage 0: a whole backward pass beside a part"):
        routes_of(beside)


@pytest.mark.catches("routes-too-many-slots")
@pytest.mark.parametrize("stages", [2, 4, 8, 35])
def test_1f1b_has_a_slot_for_each_input_that_the_simulator_keeps(stages):
    for microbatches in (2 * stages - 1, 8 * stages):
        table = schedule("1f1b", stages, microbatches)
        assert routes_of(table).kept == max(simulate(table).saved) == 2 * stages - 1


@pytest.mark.catches("simulated-slots-as-saved")
@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 1), ("interleaved", 2), ("zb_v", 2)])
def test_the_simulator_knows_the_room_that_one_program_has(name, chunks):
    for microbatches in (4, 8, 12):
        table = schedule(name, 4, microbatches, chunks)
        found = simulate(table)
        assert found.slots == routes_of(table).kept > max(found.saved)
