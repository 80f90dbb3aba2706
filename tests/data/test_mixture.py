"""Rows of several sources: each has its share, and no row depends on those read before."""

import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colossax.data import Mixture
from colossax.data.mixture import WINDOW_ROWS
from colossax.errors import DataError


class Numbered:
    """Row r of source s is the pair (s, r)."""

    seq_len = 2

    def __init__(self, name):
        self.name = name

    def __getitem__(self, row):
        return {"tokens": np.array([self.name, row], np.int32)}


def mixture(*weights, seed=0):
    sources = [Numbered(name) for name in range(len(weights))]
    return Mixture(sources, [float(weight) for weight in weights], seed=seed)


def pairs(mixed, rows):
    return [tuple(mixed[row]["tokens"].tolist()) for row in rows]


@pytest.mark.catches("mixture-forgets-its-window")
@settings(max_examples=12)
@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=4), st.integers(0, 99))
def test_each_source_gives_its_rows_in_order_none_twice_and_none_left_out(weights, seed):
    found = collections.defaultdict(list)
    for name, row in pairs(mixture(*weights, seed=seed), range(2 * WINDOW_ROWS)):
        found[name].append(row)
    for name, weight in enumerate(weights):
        np.testing.assert_array_equal(sorted(found[name]), range(len(found[name])))
        share = len(found[name]) / (2 * WINDOW_ROWS)
        assert abs(share - weight / sum(weights)) <= 1 / WINDOW_ROWS


@pytest.mark.catches("mixture-in-turn")
def test_sources_are_mixed_within_a_batch():
    counts = [
        sum(name for name, _ in pairs(mixture(3, 1), range(start, start + 64)))
        for start in range(0, WINDOW_ROWS, 64)
    ]
    assert 8 < np.mean(counts) < 24 and min(counts) > 0 and max(counts) < 40
    assert len(set(counts)) > 3


def test_a_row_does_not_depend_on_which_were_read_before():
    rows = [0, WINDOW_ROWS, 3 * WINDOW_ROWS + 5, 1, WINDOW_ROWS - 1]
    forward = pairs(mixture(1, 2, 3), sorted(rows))
    assert sorted(pairs(mixture(1, 2, 3), rows)) == sorted(forward)
    assert pairs(mixture(1, 2, 3), [7, 6])[0] == pairs(mixture(1, 2, 3), [7])[0]


def test_seeds_give_other_orders_of_the_same_shares():
    one, other = (pairs(mixture(1, 1, seed=seed), range(64)) for seed in (0, 1))
    assert one != other


def test_a_share_below_one_row_of_a_window_is_refused():
    with pytest.raises(DataError, match=r"data.mixture: a share of 1e-05 is less than one row"):
        mixture(1, 1e-5)
