"""Requests that wait for a seat, and whose turn it is."""

import itertools
from collections import OrderedDict
from collections.abc import Iterator

from colossax.scheduling.prefixes import Prefixes
from colossax.scheduling.running import Run

WINDOW = 64
"""So many requests are looked at in a step: those behind them have come later."""


class Queue:
    """Who waits, in the order of coming; who had a seat before stands in front."""

    def __init__(self, prefixes: Prefixes, *, page_tokens: int, max_wait: float, reuse: bool):
        """Nobody waits.

        Args:
            prefixes: What need not be computed.
            page_tokens: Tokens of a page.
            max_wait: Seconds after which nobody passes a request.
            reuse: Whether prefixes are looked for.
        """
        self._prefixes, self._page_tokens = prefixes, page_tokens
        self._max_wait, self._reuse = max_wait, reuse
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
        return overdue + sorted(rest, key=lambda run: -self.cached_pages(run))

    def cached_pages(self, run: Run) -> int:
        """Pages of its prefix that are there, without that of its last token."""
        if not self._reuse:
            return 0
        most = (len(run.ids) - 1) // self._page_tokens
        run.cached = self._prefixes.longest(run.key, most, run.cached)
        return run.cached
