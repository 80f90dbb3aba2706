"""Rows of several sources, each with its share."""

import functools
import threading
from collections.abc import Sequence

import numpy as np

from colossax.data.hashing import keyed_permutation
from colossax.data.rows import Row, RowSource
from colossax.errors import DataError

WINDOW_ROWS = 4096
"""Every window of so many rows has each source's share, to the nearest whole row."""

_SOURCE_KEY = 2
"""Sets the order of sources apart from those of rows (1) and documents, of the same seed."""


class Mixture:
    """Row r as a function of the sources, their weights, the seed and r.

    So a run that is resumed, or that has another number of processes, goes on with the same rows.
    Within a window the sources stand in a drawn order; each gives its own rows in theirs, none
    twice and none left out.

    Args:
        sources: Rows by number, of one length.
        weights: Of each, above 0; their sum is taken as the whole.
        seed: Of the order.

    Raises:
        DataError: A weight is so small that a window has no row of its source.

    Cost: two numbers for each row of a window, two windows are kept.
    """

    def __init__(self, sources: Sequence[RowSource], weights: Sequence[float], *, seed: int):
        self.seq_len = sources[0].seq_len
        self.counts = _counts(np.asarray(weights, np.float64))
        self._sources = tuple(sources)
        self._seed = seed
        self._lock = threading.Lock()
        self._window = functools.lru_cache(maxsize=2)(self._make_window)

    def __getitem__(self, row: int) -> Row:
        window, at = divmod(row, WINDOW_ROWS)
        with self._lock:
            source, rank = (int(array[at]) for array in self._window(window))
        return self._sources[source][window * int(self.counts[source]) + rank]

    def _make_window(self, window: int) -> tuple[np.ndarray, np.ndarray]:
        """For each row of a window its source, and which of that source's rows in it."""
        in_turn = np.repeat(np.arange(len(self.counts)), self.counts)
        source = in_turn[keyed_permutation(self._seed, _SOURCE_KEY, window, count=WINDOW_ROWS)]
        rank = np.empty(WINDOW_ROWS, np.int64)
        for one, count in enumerate(self.counts):
            rank[source == one] = np.arange(count)
        return source, rank


def _counts(weights: np.ndarray) -> np.ndarray:
    """Rows of each source in a window: the largest remainders are rounded up."""
    exact = weights / weights.sum() * WINDOW_ROWS
    counts = np.floor(exact).astype(np.int64)
    left = np.argsort(counts - exact, kind="stable")[: WINDOW_ROWS - int(counts.sum())]
    counts[left] += 1
    if not counts.all():
        share = weights.min() / weights.sum()
        raise DataError(
            f"data.mixture: a share of {share:.2g} is less than one row in {WINDOW_ROWS}; leave"
            " that source out or give it more"
        )
    return counts
