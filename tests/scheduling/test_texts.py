"""Texts of any length share steps; nobody waits for ever, and steps are as small as they may be."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossax.scheduling.texts import WINDOW, TextQueue

SIZES, USUAL = (8, 32, 100), 32


def queue(rows=1, most=(2, 8, 25)):
    return TextQueue(sizes=SIZES, usual=USUAL, rows=rows, most=most)


@pytest.mark.catches("oldest-text-passed")
@given(st.lists(st.integers(1, 100), max_size=80), st.integers(1, 3), st.randoms())
def test_any_history(lengths, rows, random):
    """Each is planned once, in rows that hold it, the oldest of those who wait first."""
    one, waiting, planned = queue(rows), {}, []
    coming = list(enumerate(lengths))
    while coming or waiting:
        for number, length in coming[: (count := random.randint(0, 9))]:
            one.add(number, length)
            waiting[number] = length
        coming = coming[count:]
        if waiting and random.random() < 0.1:
            gone = random.choice(list(waiting))
            assert one.cancel(gone) and not one.cancel(gone)
            del waiting[gone]
        plan = one.next()
        if plan is None:
            assert not waiting
            continue
        assert next(iter(waiting)) in plan.numbers and len(plan.rows) == rows
        for row in plan.rows:
            assert sum(waiting[number] for number in row) <= plan.size
            assert len(row) <= one._most[plan.size]
        tokens = sum(waiting.pop(number) for number in plan.numbers)
        assert plan.tokens == tokens and len(one) == len(waiting)
        planned += plan.numbers
    assert len(planned) == len(set(planned))


@pytest.mark.catches("few-texts-in-long-rows")
@pytest.mark.parametrize(
    ("lengths", "size", "count"),
    [([3], 8, 1), ([3, 5], 8, 2), ([3, 6], 32, 2), ([3, 3, 2], 32, 3), ([3, 90], 32, 1)]
    + [([90, 3], 100, 2), ([20] * 9, 32, 1)],
)
def test_sizes(lengths, size, count):
    one = queue()
    for number, length in enumerate(lengths):
        one.add(number, length)
    plan = one.next()
    assert (plan.size, len(plan.numbers)) == (size, count)


def test_rows_are_filled_alike():
    one = queue(rows=4)
    for number in range(8):
        one.add(number, 4)
    plan = one.next()
    assert plan.size == 8 and [len(row) for row in plan.rows] == [2, 2, 2, 2]


@pytest.mark.catches("steps-half-empty")
def test_many_texts_fill_their_steps():
    one, noise = TextQueue(sizes=(32, 128, 512), usual=512, most=(8, 32, 128)), {}
    for number, length in enumerate(np.random.default_rng(0).integers(1, 129, 2000).tolist()):
        noise[number] = length
        one.add(number, length)
    plans = list(iter(one.next, None))
    assert sum(noise.values()) / sum(plan.size for plan in plans) > 0.98
    assert max(len(plan.numbers) for plan in plans) < WINDOW


def test_what_is_read_again_has_a_step_of_its_own():
    one = queue()
    for number in range(4):
        one.add(number, 2)
    assert one.next().numbers == [0, 1, 2, 3]
    one.add(9, 2)
    for number in range(2):
        one.again(number, 2)
    assert [plan.numbers for plan in iter(one.next, None)] == [[1], [0], [9]]
