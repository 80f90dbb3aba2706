"""Tables as values and as JSON."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossax.errors import PlanError
from colossax.pipeline import FORMS, SCHEDULES, Kind, Op, Table, checked, schedule
from colossax.pipeline.table import round_layout

SMALL = '{"stages": 2, "microbatches": 1, "ticks": %s}'


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.catches("json-forgets-chunks")
def test_json_both_ways(name, form):
    table = schedule(name, 3, 5, 2 if name == "interleaved" else None, form)
    again = Table.from_json(table.to_json())
    assert again == table and hash(again) == hash(table)
    assert Table.from_json(table.to_json().encode()) == table


def test_what_json_may_leave_out():
    first = '[[["forward", 0]], []], [[], [["forward", 0], ["backward", 0, 0]]]'
    text = SMALL % f'[{first}, [[["backward", 0]], []]]'
    table = checked(Table.from_json(text))
    assert table.layout == round_layout(2, 1) == ((0, 0), (1, 0))
    assert table.chunks == 1
    assert table.order(1) == (Op(Kind.FORWARD, 0), Op(Kind.BACKWARD, 0))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "schedule: it is no JSON: .*; write it as Table.to_json does"),
        ("[]", "schedule: it is a list, not an object; write it as Table.to_json does"),
        ("{}", "it has no 'stages'"),
        ('{"stages": 2}', "it has no 'microbatches'"),
        ('{"stages": "2"}', "'stages' is a text, not an integer"),
        ('{"stages": true}', "'stages' is true or false, not an integer"),
        ('{"stages": 0}', "'stages' is 0, not 1 or more"),
        (
            '{"stages": 2, "microbatches": 99999999}',
            "'microbatches' is 99999999, not 1 or more and",
        ),
        ('{"stages": 9999, "microbatches": 1, "chunks": 9999}', "9999 stages of 9999 chunks, more"),
        ('{"stage": 2}', "unknown field 'stage'; did you mean 'stages'"),
        (SMALL % "null", "'ticks' is null, not a list"),
        (SMALL % "[1]", "tick 0 is an integer, not a list"),
        (SMALL % "[[1, 2]]", "the cell of tick 0, stage 0 is an integer, not a list"),
        (
            SMALL % "[[[], [1]]]",
            "an operation in the cell of tick 0, stage 1 is an integer, not a li",
        ),
        (
            SMALL % '[[[["forward"]]]]',
            "an operation in .*, stage 0 is a list of 1, not .kind, micro",
        ),
        (SMALL % '[[[["forwards", 0]]]]', "of an unknown kind 'forwards'; did you mean 'forward'"),
        (SMALL % "[[[[1, 0]]]]", "the kind of an operation in .* is an integer, not a text"),
        (
            SMALL % '[[[["forward", 0.5]]]]',
            "a number of an operation in .* is a number, not an integ",
        ),
        (
            '{"stages": 1, "microbatches": 1, "layout": [[0]]}',
            "position 0 of 'layout' has 1 numbers",
        ),
        ('{"stages": 1, "microbatches": 1, "layout": [0]}', "position 0 of 'layout' is an integer"),
        ('{"stages": 1, "microbatches": 1, "layout": 0}', "'layout' is an integer, not a list"),
    ],
)
def test_refusals(text, sentence):
    with pytest.raises(PlanError, match=sentence):
        Table.from_json(text)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.sampled_from(("forward", "x")),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=12,
)


@given(
    st.fixed_dictionaries(
        {"stages": _VALUES, "microbatches": _VALUES},
        optional={"chunks": _VALUES, "layout": _VALUES, "ticks": _VALUES},
    )
)
def test_whatever_is_written_is_read_or_refused(value):
    try:
        checked(Table.from_json(json.dumps(value)))
    except PlanError as problem:
        assert str(problem).startswith("schedule: ")


def test_places_and_orders():
    table = schedule("zb_v", 3, 2)
    assert [table.position(*chunk) for chunk in table.layout] == list(range(6))
    assert (table.position(2, 0), table.position(2, 1)) == (2, 3)
    for tick, stage, op in table.operations():
        position = table.position(stage, op.chunk)
        assert table.where(op.kind, position, op.microbatch) == (tick, stage)
        assert table.has(op.kind, position, op.microbatch)
    assert not table.has(Kind.BACKWARD, 0, 0)
    assert sum(len(table.order(stage)) for stage in range(3)) == 3 * 2 * 6


def test_operations_of_a_cell_run_in_order_however_they_are_listed():
    ops = (Op(Kind.WEIGHT, 0), Op(Kind.INPUT, 0), Op(Kind.FORWARD, 0))
    table = Table(1, 1, 1, ((0, 0),), ((ops,),))
    assert table.order(0) == ops[::-1]
    assert table.kinds(0) == (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)
    assert checked(table) is table


def op_of(kind):
    """As `Op(kind, 3, 1)` gives it where nobody enforces annotations."""
    op = object.__new__(Op)
    for name, value in {"kind": kind, "microbatch": 3, "chunk": 1}.items():
        object.__setattr__(op, name, value)
    op.__post_init__()
    return op


def test_kinds_by_their_words():
    assert op_of("input").kind is Kind.INPUT
    assert str(op_of(Kind.INPUT)) == "input of microbatch 3, chunk 1"
    with pytest.raises(PlanError, match="unknown kind of operation 'inputs'; did you mean 'input'"):
        op_of("inputs")
