"""The pages of all seats as one array, given out again and again without copying it whole."""

from collections.abc import Sequence

import numpy as np


class Tables:
    """Arrays `[seats, pages_a_seat]` that hold the same but for what changed since they were used.

    A plan's array is not written while its step may still read it. When the step is over the
    array is brought up to date, cell by cell, and goes to another plan: three arrays do for two
    steps on their way, and a step costs as many cells as pages were added in the last three.
    """

    def __init__(self, seats: int, pages_a_seat: int):
        """All zero, a page like any other."""
        self._width = pages_a_seat
        self._latest = np.zeros((seats, pages_a_seat), np.int32)
        self._spare: list[np.ndarray] = []
        self._behind: dict[int, dict[int, int]] = {id(self._latest): {}}

    def write(self, seat: int, column: int, pages: Sequence[int]) -> None:
        """Let a seat have these pages, from a column on."""
        first = seat * self._width + column
        for behind in self._behind.values():
            behind.update(enumerate(pages, first))

    def current(self, *, used: bool) -> np.ndarray:
        """An array of what was written.

        Args:
            used: Whether a step that is not over has the last one that was given out.
        """
        if self._behind[id(self._latest)]:
            if used:
                self._latest = self._another()
            behind = self._behind[id(self._latest)]
            cells = np.fromiter(behind, np.int64, len(behind))
            self._latest.reshape(-1)[cells] = np.fromiter(behind.values(), np.int32, len(behind))
            behind.clear()
        return self._latest

    def _another(self) -> np.ndarray:
        if self._spare:
            return self._spare.pop()
        made = self._latest.copy()
        self._behind[id(made)] = dict(self._behind[id(self._latest)])
        return made

    def give_back(self, table: np.ndarray) -> None:
        """Note that no step has this one any more."""
        if table is not self._latest:
            self._spare.append(table)
