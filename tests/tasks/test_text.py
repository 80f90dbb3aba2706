"""Rows dealt out anew: each once, by number alone, from many documents."""

import numpy as np
import pytest

from colossax.data import Rows, Split
from colossax.tasks import text
from colossax.tasks.text import ShuffledRows

SEQ = 8
LENGTHS = np.full(30, 40)


@pytest.fixture
def rows():
    """30 documents of 40 tokens; a token tells its place in the text."""
    starts = np.cumsum(LENGTHS) - LENGTHS
    tokens = np.arange(LENGTHS.sum(), dtype=np.uint16)
    split = Split(tokens=tokens, starts=starts, lengths=LENGTHS)
    return Rows(split, seq_len=SEQ, seed=0)


def first_tokens(rows, numbers):
    return [int(rows[number]["tokens"][0]) for number in numbers]


def test_an_epoch_holds_every_row_once(rows):
    count = rows.epoch_tokens // SEQ
    shuffled = ShuffledRows(rows, seed=0)
    plain = first_tokens(rows, range(count))
    assert sorted(first_tokens(shuffled, range(count))) == sorted(plain)
    assert first_tokens(shuffled, range(count)) != plain
    assert first_tokens(shuffled, range(count)) != first_tokens(shuffled, range(count, 2 * count))


def test_a_row_depends_on_seed_and_number_alone(rows):
    one, other = ShuffledRows(rows, seed=0), ShuffledRows(rows, seed=0)
    numbers = [311, 2, 100]
    assert first_tokens(one, numbers) == first_tokens(other, reversed(numbers))[::-1]
    assert first_tokens(one, range(20)) != first_tokens(ShuffledRows(rows, seed=1), range(20))


def test_a_batch_sees_many_documents(rows):
    documents = {token // 40 for token in first_tokens(ShuffledRows(rows, seed=0), range(16))}
    in_order = {token // 40 for token in first_tokens(rows, range(16))}
    assert len(in_order) <= 5 < len(documents)


@pytest.mark.catches("rows-of-one-window")
def test_long_epochs_are_shuffled_by_windows(rows, monkeypatch):
    monkeypatch.setattr(text, "WINDOW_ROWS", 10)
    shuffled = ShuffledRows(rows, seed=0)
    orders = set()
    for window in range(3):
        numbers = range(10 * window, 10 * (window + 1))
        found, before = first_tokens(shuffled, numbers), first_tokens(rows, numbers)
        assert sorted(found) == sorted(before)
        orders.add(tuple(before.index(token) for token in found))
    assert len(orders) == 3
