"""Seconds that are predicted of what stages compute and send to one another."""

from unittest.mock import Mock

import pytest

from colossax.pipeline import schedule
from colossax.planner.counting.counted_stages import _Counting, transfer_s
from colossax.planner.counting.stage_programs import Edge
from colossax.planner.counting.traced_flops import TracedFlops
from colossax.step.programs import Ran


def edge(origin, end, *, messages, once=0.0):
    """A second for each message, and of what is sent once."""
    return Edge(
        origin=origin,
        end=end,
        bytes=messages,
        messages=messages,
        link="ethernet",
        seconds=messages + once,
        passed_s=float(messages),
    )


@pytest.mark.parametrize(
    ("name", "chunks", "messages"),
    [
        ("1f1b", 1, {(0, 1): 4, (1, 0): 4}),
        # Positions 0, 1, 2, 3 on stages 0, 1, 0, 1: three boundaries, each there and back.
        ("interleaved", 2, {(0, 1): 4 * 3, (1, 0): 4 * 3}),
        # On stages 0, 1, 1, 0: two.
        ("zb_v", 2, {(0, 1): 4 * 2, (1, 0): 4 * 2}),
    ],
)
def test_a_transfer_is_that_of_one_message(name, chunks, messages):
    table = schedule(name, stages=2, microbatches=4, chunks=chunks)
    edges = [edge(*link, messages=count) for link, count in messages.items()]
    assert transfer_s(table, edges) == 1.0


def test_what_is_sent_once_is_not_spread_over_the_messages():
    """Such as a table at home on the first stage, which the last one reads."""
    table = schedule("1f1b", stages=3, microbatches=4, chunks=1)
    edges = [edge(0, 1, messages=4), edge(0, 2, messages=0, once=60.0)]
    assert transfer_s(table, edges) == 1.0
    assert [one.once_s for one in edges] == [0.0, 60.0]
    assert transfer_s(table, edges[1:]) == 0.0
    # What layers count for the loss goes from every stage to the last one.
    assert transfer_s(table, [edge(0, 2, messages=4)]) == 1.0


@pytest.mark.catches("stage-seconds-all-wide")
def test_what_a_stage_multiplies_in_float8_takes_half_and_what_is_not_seen_does_not():
    """Of 20 FLOPs 12 are in float8, and 10 more are not seen; 4 a second, or 8."""
    counting, ran = object.__new__(_Counting), Mock(spec=Ran, stage=0)
    counting._flops = {id(ran): TracedFlops(flops=20, left_out=(), float8_flops=12)}
    counting._rates, counting._scale, counting.timed = [[4.0, 8.0]], 1.5, False
    assert counting._seconds(ran) == 12 / 8 + (20 - 12 + 10) / 4
