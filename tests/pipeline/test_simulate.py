"""What a table takes, against sums by hand and a slow search for starts."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colossax.errors import PlanError
from colossax.pipeline import SCHEDULES, Costs, Kind, schedule, simulate
from colossax.pipeline.values import read, written

F, B = Kind.FORWARD, Kind.BACKWARD


@pytest.mark.catches("lockstep-mean-of-stages")
def test_lock_step_takes_the_slowest_stage():
    costs = Costs(forward=(1, 2, 3), input=(4, 1, 1), weight=(1, 5, 1), boundary_bytes=10)
    report = simulate(schedule("1f1b", 3, 5), costs)
    assert report.time == 7 * 3 + 7 * 6
    assert report.useful == (5 * 6, 5 * 8, 5 * 5)
    assert report.bubble == pytest.approx(1 - 5 * 19 / (3 * 63))
    assert (report.executed[F], report.executed[B]) == (7, 7)


def test_one_after_another_by_hand():
    """Two stages, two microbatches: 0 and 1 wait for each other as the arrows say."""
    costs = Costs(forward=(1, 3), input=(1, 2), weight=(1, 0), transfer=0.5)
    # Stage 0: F0 0-1, F1 1-2, B0 6.5+.5 7-9, B1 12-14; stage 1: F0 1.5-4.5, B0 -6.5, F1 -9.5, -11.5
    assert simulate(schedule("1f1b", 2, 2, form="free"), costs, "free").time == 14


@pytest.mark.catches("transfer-for-nothing")
def test_transfers_take_time_where_there_are_any():
    costs = Costs(transfer=0.5)
    assert simulate(schedule("1f1b", 1, 3), costs).time == 9
    assert simulate(schedule("1f1b", 1, 3), costs, "free").time == 9
    assert simulate(schedule("1f1b", 2, 3), costs).time == 4 * (3 + 2 * 0.5)
    assert simulate(schedule("zb_h1", 2, 3), costs).time == 4 * (2 + 2 * 0.5) + 3


def slow_time(table, costs):
    """Starts are put off until each operation is after all that it needs."""
    orders = [table.order(stage) for stage in range(table.stages)]
    nodes = [(stage, at) for stage, order in enumerate(orders) for at in range(len(order))]
    makers = {}
    for stage, at in nodes:
        op = orders[stage][at]
        if (value := written(op, table.position(stage, op.chunk))) is not None:
            makers[value] = (stage, at)
    seconds = {
        (stage, at): costs.seconds(orders[stage][at].kind, table.stages)[stage] / table.chunks
        for stage, at in nodes
    }
    ends, settled = dict.fromkeys(nodes, 0.0), False
    while not settled:
        settled = True
        for stage, at in nodes:
            op = orders[stage][at]
            needed = [
                makers[v] for v in read(op, table.position(stage, op.chunk), len(table.layout))
            ]
            start = max(
                [ends[stage, at - 1] if at else 0.0]
                + [ends[one] + costs.transfer * (one[0] != stage) for one in needed]
            )
            if start + seconds[stage, at] != ends[stage, at]:
                ends[stage, at], settled = start + seconds[stage, at], False
    return max(ends.values())


SECONDS = st.integers(0, 8).map(float)


@settings(max_examples=25)
@given(st.sampled_from(sorted(SCHEDULES)), st.sampled_from(("lockstep", "free")), st.data())
@pytest.mark.catches("free-forgets-transfers")
def test_free_is_the_longest_way_through_the_table(name, form, data):
    stages, microbatches = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    each = st.tuples(*[SECONDS] * stages)
    costs = Costs(
        forward=data.draw(each),
        input=data.draw(each),
        weight=data.draw(each),
        transfer=data.draw(SECONDS),
    )
    chunks = 2 if name == "interleaved" else None
    table = schedule(name, stages, microbatches, chunks, form)
    found = simulate(table, costs, "free")
    assert math.isclose(found.time, slow_time(table, costs))
    assert 0 <= found.bubble <= 1
    assert found.time >= max(found.useful) - 1e-9


@pytest.mark.parametrize("m", [2, 8])
@pytest.mark.catches("wrapped-link")
def test_bytes_of_links(m):
    """In lock step all send whenever one does, also from the last to the first; free, who must."""
    costs = Costs(boundary_bytes=100)
    ring = [(s, (s + 1) % 4) for s in range(4)]
    back = [(to, at) for at, to in ring]
    plain = simulate(schedule("1f1b", 4, m), costs)
    assert plain.link_bytes == dict.fromkeys(ring + back, 100 * (m + 3))
    plain = simulate(schedule("1f1b", 4, m, form="free"), costs, "free")
    assert plain.link_bytes == dict.fromkeys(ring[:3] + back[:3], 100 * m)
    rounds = simulate(schedule("interleaved", 4, m, 2, "free"), costs, "free")
    wrapped = dict.fromkeys([(3, 0), (0, 3)], 100 * m)
    assert rounds.link_bytes == dict.fromkeys(ring[:3] + back[:3], 200 * m) | wrapped
    v = simulate(schedule("zb_v", 4, m, form="free"), costs, "free")
    assert v.link_bytes == dict.fromkeys(ring[:3] + back[:3], 200 * m)
    v = simulate(schedule("zb_v", 4, m), costs)
    assert v.link_bytes == dict.fromkeys(ring + back, 2 * 100 * (2 * m + 6))
    assert simulate(schedule("zb_h1", 1, m), costs).link_bytes == {}


def test_two_stages_have_one_link_each_way():
    report = simulate(schedule("1f1b", 2, 4), Costs(boundary_bytes=1))
    assert report.link_bytes == {(0, 1): 10, (1, 0): 10}


def test_what_takes_no_time_has_no_bubble():
    assert simulate(schedule("1f1b", 2, 2), Costs(forward=0, input=0, weight=0)).bubble == 0


@pytest.mark.parametrize(
    ("costs", "sentence"),
    [
        (
            {"forward": (1, 2)},
            "costs.forward: 2 numbers for 3 stages; give one for each, or one for",
        ),
        ({"input": -1}, "costs.input: found -1; give 0 or more"),
        (
            {"weight": (1, math.nan, 1)},
            "costs.weight: found nan, which is not finite; give 0 or more",
        ),
        ({"forward": True}, "costs.forward: found True; give a number of seconds"),
        ({"transfer": -0.5}, "costs.transfer: found -0.5; give 0 or more"),
        ({"boundary_bytes": -1}, "costs.boundary_bytes: found -1; give 0 or more"),
    ],
)
def test_costs_that_are_none(costs, sentence):
    with pytest.raises(PlanError, match=sentence):
        simulate(schedule("1f1b", 3, 3), Costs(**costs))


def test_an_unknown_form():
    with pytest.raises(PlanError, match="unknown form 'fre'; did you mean 'free'"):
        simulate(schedule("1f1b", 3, 3), form="fre")
