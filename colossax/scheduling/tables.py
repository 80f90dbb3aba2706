"""The pages of all seats as one array, given out again and again without copying it whole."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Tables:
    """Arrays `[seats, pages_a_seat]` that hold the same but for what changed since they were used.

    A plan's array is not written while its step may still read it. When the step is over the
    array is brought up to date, cell by cell, and goes to another plan: three arrays do for two
    steps on their way, and a step costs as many cells as pages were added in the last three.

    Attributes:
        version: Grows with all that is written.
    """

    def __init__(self, seats: int, pages_a_seat: int):
        """All zero, a page like any other."""
        self._width, self.version = pages_a_seat, 0
        self._latest = _Table(np.zeros((seats, pages_a_seat), np.int32), {})
        self._all = [self._latest]
        self._spare: list[_Table] = []

    def write(self, seat: int, column: int, pages: Sequence[int]) -> None:
        """Let a seat have these pages, from a column on."""
        self.version += 1
        first = seat * self._width + column
        for table in self._all:
            table.behind.update(enumerate(pages, first))

    def current(self, *, used: bool) -> np.ndarray:
        """An array of what was written.

        Args:
            used: Whether a step that is not over has the last one that was given out.
        """
        if not self._latest.behind:
            return self._latest.array
        if used:
            self._latest = self._spare.pop() if self._spare else self._another()
        array, behind = self._latest
        cells = np.fromiter(behind, np.int64, len(behind))
        array.reshape(-1)[cells] = np.fromiter(behind.values(), np.int32, len(behind))
        behind.clear()
        return array

    def _another(self) -> "_Table":
        array, behind = self._latest
        self._all.append(_Table(array.copy(), dict(behind)))
        return self._all[-1]

    def give_back(self, array: np.ndarray) -> None:
        """Note that no step has this one any more."""
        if array is not self._latest.array:
            self._spare.extend(table for table in self._all if table.array is array)


class _Table(NamedTuple):
    """An array, and the pages of its cells that were written since it was used, by place."""

    array: np.ndarray
    behind: dict[int, int]
