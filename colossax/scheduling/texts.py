"""Texts that wait to be read whole, and which of them share a step."""

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence

WINDOW = 512
"""So many texts are looked at in a step: those behind them have come later."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextPlan:
    """A step.

    Attributes:
        size: Tokens of each of its rows.
        rows: Numbers of the texts of each row, in the order in which they lie there.
        tokens: Of all of them together.
    """

    size: int
    rows: tuple[tuple[int, ...], ...]
    tokens: int

    @property
    def numbers(self) -> list[int]:
        """Of all texts of the step."""
        return [number for row in self.rows for number in row]


class TextQueue:
    """Texts in the order of coming, put together into steps of few sizes.

    The oldest is in the next step whatever else is; those that came after it fill what it leaves.
    A step has the smallest size that takes all who wait, or else the usual one; one that holds a
    text longer than that is as large as the text asks for.
    """

    def __init__(self, *, sizes: Sequence[int], usual: int, rows: int = 1, most: Sequence[int]):
        """Nobody waits.

        Args:
            sizes: Tokens of a row, ascending; no text may be longer than the last.
            usual: Of them, where many texts wait.
            rows: Of a step.
            most: Texts of a row, for each size.
        """
        assert list(sizes) == sorted(sizes) and usual in sizes and len(most) == len(sizes)
        self._most = dict(zip(sizes, most, strict=True))
        self._usual, self._rows = usual, rows
        self._waiting: OrderedDict[int, int] = OrderedDict()
        self._alone: set[int] = set()

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def add(self, number: int, length: int) -> None:
        """Somebody comes."""
        self._waiting[number] = length

    def again(self, number: int, length: int) -> None:
        """A text has to be read once more, before all others and in a step of its own."""
        self._waiting[number] = length
        self._waiting.move_to_end(number, last=False)
        self._alone.add(number)

    def cancel(self, number: int) -> bool:
        """Nobody wants it any more; whether it waited."""
        self._alone.discard(number)
        return self._waiting.pop(number, None) is not None

    def next(self) -> TextPlan | None:
        """The next step, whose texts wait no longer; None where nobody waits."""
        if not self._waiting:
            return None
        window = list(self._waiting)[:WINDOW]
        if window[0] in self._alone:
            window = window[:1]
        else:
            window = [number for number in window if number not in self._alone]
        plan = self._planned(window)
        for number in plan.numbers:
            del self._waiting[number]
            self._alone.discard(number)
        return plan

    def _planned(self, window: list[int]) -> TextPlan:
        oldest = self._waiting[window[0]]
        all_told = len(window) == len(self._waiting)
        enough = [size for size in self._most if size >= oldest]
        for size in enough:
            plan, left = self._packed(window, size)
            if size >= self._usual or (all_told and not left):
                return plan
        raise AssertionError(f"a text of {oldest} tokens is longer than {max(self._most)}")

    def _packed(self, window: list[int], size: int) -> tuple[TextPlan, int]:
        """What of a window goes into rows of a size, and how many do not."""
        room, rows, left = [size] * self._rows, [[] for _ in range(self._rows)], 0
        most = self._most[size]
        for number in window:
            length = self._waiting[number]
            open_rows = [at for at in range(self._rows) if len(rows[at]) < most]
            # The emptiest: all rows take equally long, so a row that is full gains nothing.
            at = max(open_rows, key=room.__getitem__, default=None)
            if at is None or room[at] < length:
                left += 1
                continue
            rows[at].append(number)
            room[at] -= length
        tokens = self._rows * size - sum(room)
        return TextPlan(size=size, rows=tuple(map(tuple, rows)), tokens=tokens), left
