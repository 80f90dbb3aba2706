"""A table passes if and only if it runs."""

import dataclasses
import itertools
import random

import pytest

from colossax.errors import PlanError
from colossax.pipeline import SCHEDULES, Kind, Op, Table, checked, movable, schedule
from tests.pipeline.interpreter import runs

SMALL = [
    ("gpipe", 2, 3, None),
    ("1f1b", 3, 4, None),
    ("interleaved", 2, 3, 2),
    ("zb_h1", 3, 3, None),
    ("zb_v", 2, 3, None),
]


def passes(table):
    try:
        return checked(table) is table
    except PlanError:
        return False


def with_cell(table, tick, stage, cell):
    ticks = [list(cells) for cells in table.ticks]
    ticks[tick][stage] = tuple(cell)
    return dataclasses.replace(table, ticks=tuple(map(tuple, ticks)))


def places(table):
    return [(tick, stage, op) for tick, stage, op in table.operations()]


def without(table, tick, stage, op):
    return with_cell(table, tick, stage, [one for one in table.ticks[tick][stage] if one != op])


def beside(table, tick, stage, op):
    return with_cell(table, tick, stage, (*table.ticks[tick][stage], op))


def lost(rng, table):
    return without(table, *rng.choice(places(table)))


def moved_in_time(rng, table):
    tick, stage, op = rng.choice(places(table))
    later = min(max(tick + rng.choice((-2, -1, 1, 2)), 0), len(table.ticks) - 1)
    return beside(without(table, tick, stage, op), later, stage, op)


def moved_to_another_stage(rng, table):
    tick, stage, op = rng.choice(places(table))
    other = (stage + 1) % table.stages
    return beside(without(table, tick, stage, op), tick, other, op)


def doubled(rng, table):
    tick, stage, op = rng.choice(places(table))
    return beside(table, rng.randrange(len(table.ticks)), stage, op)


def changed(rng, table):
    tick, stage, op = rng.choice(places(table))
    field, values = rng.choice(
        [
            ("microbatch", range(-1, table.microbatches + 1)),
            ("chunk", range(-1, table.chunks + 1)),
            ("kind", list(Kind)),
        ]
    )
    other = dataclasses.replace(op, **{field: rng.choice(list(values))})
    return beside(without(table, tick, stage, op), tick, stage, other)


def swapped(rng, table):
    """Two operations of a stage change places."""
    stage = rng.randrange(table.stages)
    one, other = rng.sample([place for place in places(table) if place[1] == stage], 2)
    table = without(without(table, *one), *other)
    return beside(beside(table, one[0], stage, other[2]), other[0], stage, one[2])


def fused(rng, table):
    """Two parts of a backward become one, in the tick of either."""
    weights = [place for place in places(table) if place[2].kind is Kind.WEIGHT]
    if not weights:
        return lost(rng, table)
    tick, stage, op = rng.choice(weights)
    part = dataclasses.replace(op, kind=Kind.INPUT)
    before, _ = table.where(Kind.INPUT, table.position(stage, op.chunk), op.microbatch)
    whole = dataclasses.replace(op, kind=Kind.BACKWARD)
    table = without(without(table, tick, stage, op), before, stage, part)
    return beside(table, rng.choice((tick, before)), stage, whole)


def laid_out_otherwise(rng, table):
    one, other = rng.sample(range(len(table.layout)), 2)
    layout = list(table.layout)
    layout[one], layout[other] = layout[other], layout[one]
    return dataclasses.replace(table, layout=tuple(layout))


SLIPS = (
    lost,
    moved_in_time,
    moved_to_another_stage,
    doubled,
    changed,
    swapped,
    fused,
    laid_out_otherwise,
)


@pytest.mark.parametrize("slip", SLIPS)
@pytest.mark.catches("read-in-the-same-tick")
@pytest.mark.catches("twice-is-once")
@pytest.mark.catches("two-of-a-kind")
@pytest.mark.catches("missing-is-there")
def test_what_passes_is_what_runs(slip):
    """Good tables with a slip or two: the check and a run by hand agree on each."""
    rng = random.Random(7)
    found = set()
    for case, (given, form) in itertools.product(
        range(12), itertools.product(SMALL, ("lockstep", "free"))
    ):
        table = slip(rng, schedule(*given, form=form))
        if case % 3 == 2:
            table = rng.choice(SLIPS)(rng, table)
        assert passes(table) == runs(table), table.to_json()
        found.add(passes(table))
    assert False in found


@pytest.mark.parametrize("slip", [lost, doubled, moved_to_another_stage])
def test_no_such_slip_passes(slip):
    rng = random.Random(11)
    for given in SMALL:
        table = schedule(*given)
        assert not any(passes(broken) for _ in range(20) if (broken := slip(rng, table)) != table)


FORWARD, BACKWARD, INPUT, WEIGHT = Kind


def table_of(*ticks, stages=2, microbatches=1, layout=((0, 0), (1, 0)), chunks=1):
    return Table(stages, microbatches, chunks, layout, ticks)


def cell(*kinds):
    return tuple(Op(kind, 0) for kind in kinds)


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        (
            table_of((cell(FORWARD), cell(FORWARD, BACKWARD)), (cell(BACKWARD), ())),
            "tick 0, stage 1: forward of microbatch 0, chunk 0 reads what stage 0, chunk 0 makes of"
            " microbatch 0 in tick 0; move it to a later tick",
        ),
        (
            table_of(((), cell(FORWARD, BACKWARD)), (cell(BACKWARD), ())),
            "tick 0, stage 1: forward .* reads what stage 0, chunk 0 makes .*, which nobody writes",
        ),
        (
            table_of((cell(FORWARD), ()), ((), cell(FORWARD)), (cell(BACKWARD), cell(BACKWARD))),
            "tick 2, stage 0: backward .* reads the gradient that stage 1, chunk 0 makes of",
        ),
        (
            table_of((cell(FORWARD), ()), ((), cell(FORWARD, INPUT)), (cell(BACKWARD), ())),
            "stage 1 has no weight of microbatch 0, chunk 0 in any of 3 ticks; add it",
        ),
        (
            table_of((cell(FORWARD), ()), ((), cell(FORWARD, BACKWARD))),
            "stage 0 has no backward of microbatch 0, chunk 0 in any of 2 ticks; add it",
        ),
        (
            table_of(
                (cell(FORWARD), ()), ((), cell(FORWARD, BACKWARD)), (cell(BACKWARD, WEIGHT), ())
            ),
            "tick 2, stage 0: weight .*, which its backward has made; leave one out",
        ),
        (
            table_of(
                (cell(FORWARD), ()), ((), cell(FORWARD, BACKWARD)), (cell(BACKWARD), cell(INPUT))
            ),
            "tick 2, stage 1: input .*, which tick 1 has as backward; leave one out",
        ),
        (
            table_of((cell(FORWARD), cell(FORWARD, FORWARD))),
            "tick 0, stage 1: forward .* beside forward .*, two of one kind; move one to another",
        ),
        (
            table_of((cell(FORWARD), ()), ((Op(FORWARD, 1),), ())),
            "tick 1, stage 0: forward of microbatch 1, .*: the table is of 1, counted from 0",
        ),
        (
            table_of((cell(FORWARD), (Op(FORWARD, 0, 1),))),
            "tick 0, stage 1: forward of microbatch 0, chunk 1: the table is of 1, counted from 0",
        ),
        (
            table_of((cell(FORWARD),)),
            "tick 0 has 1 cells for 2 stages; give one for each, empty where",
        ),
        (
            table_of(layout=((0, 0), (0, 0))),
            "position 1 of the layout is chunk 0 of stage 0, which is there twice or is none of 2",
        ),
        (table_of(layout=((0, 0), (2, 0))), "position 1 of the layout is chunk 0 of stage 2, whic"),
        (table_of(layout=((0, 0),)), "the layout lacks chunk 0 of stage 1; name each chunk of eac"),
        (table_of(stages=0), "it has 0 stages; give 1 or more"),
        (table_of(microbatches=0), "it has 0 microbatches; give 1 or more"),
        (table_of(chunks=0), "it has 0 chunks; give 1 or more"),
    ],
)
def test_refusals_name_tick_and_stage(table, sentence):
    with pytest.raises(PlanError, match=f"^schedule: {sentence}"):
        checked(table)


@pytest.mark.catches("bound-off-by-one")
def test_the_bound_of_saved_inputs():
    table = schedule("1f1b", 4, 16)
    assert checked(table, most_saved=7) is table
    with pytest.raises(PlanError, match="tick 6, stage 0: forward of microbatch 6, .* makes 7 inp"):
        checked(table, most_saved=6)
    with pytest.raises(PlanError, match="at most 1 may; go back with a microbatch before it"):
        checked(table, most_saved=1)


@pytest.mark.catches("far-moves")
def test_rolls_move_to_neighbours_alone():
    for name in SCHEDULES:
        table = schedule(name, 4, 4, 2 if name == "interleaved" else None)
        assert movable(table) is table
    table = Table(4, 1, 1, ((0, 0), (2, 0), (1, 0), (3, 0)), ())
    with pytest.raises(
        PlanError, match="position 0 is on stage 0 and position 1 on stage 2, and one program"
    ):
        movable(table)
