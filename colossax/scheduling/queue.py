"""Requests that wait for a seat, and whose turn it is."""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator

from colossax.scheduling.running import Run

WINDOW = 64
"""So many requests are looked at in a step: those behind them have come later."""


class Queue:
    """Who waits, in the order of coming; who had a seat before stands in front."""

    def __init__(self, cached: Callable[[Run], int], max_wait: float):
        """Nobody waits.

        Args:
            cached: Pages of a prompt that need not be computed.
            max_wait: Seconds after which nobody passes a request.
        """
        self._cached, self._max_wait = cached, max_wait
        self._runs: OrderedDict[int, Run] = OrderedDict()
        self._unseen: list[Run] = []

    def __len__(self) -> int:
        """How many wait."""
        return len(self._runs)

    def add(self, run: Run) -> None:
        """Somebody comes."""
        self._runs[run.number] = run
        self._unseen.append(run)

    def put_back(self, run: Run) -> None:
        """Somebody has lost its seat."""
        run.preempted = True
        self._runs[run.number] = run
        self._runs.move_to_end(run.number, last=False)

    def remove(self, run: Run) -> None:
        """Somebody has a seat now, or is over; whoever does not wait is left alone."""
        self._runs.pop(run.number, None)

    def see(self, now: float) -> None:
        """Those who came since the last step have come now."""
        for run in self._unseen:
            run.since_s = now
        self._unseen.clear()

    def first(self, count: int) -> Iterator[Run]:
        """The first ones."""
        return itertools.islice(self._runs.values(), count)

    def overdue(self, run: Run, now: float) -> bool:
        """Whether nobody may pass it."""
        return run.preempted or (run.since_s is not None and now - run.since_s > self._max_wait)

    def in_turn(self, now: float) -> list[Run]:
        """First those whom nobody may pass, then the longest cached prefix first."""
        window = list(self.first(WINDOW))
        # Whoever is overdue stands before all who are not: in order of coming.
        overdue = list(itertools.takewhile(lambda run: self.overdue(run, now), window))
        rest = window[len(overdue) :]
        return overdue + sorted(rest, key=lambda run: -self._cached(run))
