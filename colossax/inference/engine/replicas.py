"""Several engines that share requests: each has seats, pages and prefixes of its own."""

import functools
import itertools
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence

from colossax.config import BoundPlan
from colossax.inference.engine.driving import Over, dealt, to_their_ends
from colossax.inference.engine.engine import Engine
from colossax.inference.engine.program import Sizes
from colossax.inference.engine.values import Constraint, EngineStats
from colossax.scheduling import Emitted, EngineRequest

LOOK_S = 0.0002
"""Between two looks for whose step is over, where none is: JAX waits for one array alone."""


class Replicas:
    """Requests spread over engines, with the methods of one `Engine`.

    A request goes where least is to be computed before its first token: of prompts that have not
    been read, its own without the prefix that is cached there, and of requests that have no seat;
    it stays there. All engines have steps on their way before the tokens of any are waited for,
    and whose step is over first is heard first.

    Attributes:
        began: As of `Engine`.
        engines: Those that there are.

    Cost: prefixes are computed anew in each engine that comes to need them.
    """

    def __init__(self, bound: BoundPlan, engines: Sequence[Engine]):
        """Serve by these.

        Args:
            bound: All devices, and the plan as generation has it.
            engines: One or more of equal sizes, that nobody else asks.
        """
        self.bound, self.engines = bound, tuple(engines)
        self.began: Callable[[list[int]], None] = lambda _numbers: None
        self._numbers = itertools.count()
        self._places: dict[int, tuple[int, int]] = {}
        self._names: list[dict[int, int]] = [{} for _ in self.engines]
        for at, engine in enumerate(self.engines):
            # Weakly: engines and their caches end with whoever asks them, at once.
            engine.began = functools.partial(_begun, weakref.ref(self), at)

    @property
    def sizes(self) -> Sizes:
        """Of each engine."""
        return self.engines[0].sizes

    @property
    def seats(self) -> int:
        """Of all together."""
        return sum(engine.seats for engine in self.engines)

    @property
    def busy(self) -> bool:
        """As of `Engine`."""
        return any(engine.busy for engine in self.engines)

    @property
    def stats(self) -> EngineStats:
        """Of all together, and of each."""
        each = tuple(engine.stats for engine in self.engines)
        steps = Counter[str]()
        for one in each:
            steps.update(one.steps)
        first, *others = (one.scheduler for one in each)
        return EngineStats(
            steps=dict(steps),
            scheduler=sum(others, first),
            host_bytes=sum(one.host_bytes for one in each),
            each=each,
        )

    def add(self, request: EngineRequest, constraint: Constraint | None = None) -> int:
        """As of `Engine`."""
        self.engines[0].check(request, constraint)
        ahead = [engine.ahead(request) for engine in self.engines]
        at = min(range(len(ahead)), key=ahead.__getitem__)
        return self._add(at, request, constraint)

    def _add(self, at: int, request: EngineRequest, constraint: Constraint | None = None) -> int:
        own = self.engines[at].add(request, constraint)
        number = next(self._numbers)
        self._places[number], self._names[at][own] = (at, own), number
        return number

    def cancel(self, number: int) -> None:
        """As of `Engine`."""
        if number in self._places:
            at, own = self._places[number]
            self.engines[at].cancel(own)

    def warm(self) -> None:
        """As of `Engine`, one after another."""
        for engine in self.engines:
            engine.warm()

    def step(self) -> list[Emitted]:
        """Send steps of all on their way, and give what those gave that are over, at least one."""
        for engine in self.engines:
            engine.send()
        busy = [engine for engine in self.engines if engine.busy]
        while busy and all(engine.waits for engine in busy):
            time.sleep(LOOK_S)
        told = []
        for at, engine in enumerate(self.engines):
            if not engine.waits:
                told += [self._named(at, one) for one in engine.land()]
        return told

    def generate_all(
        self, requests: Sequence[EngineRequest], over: Over | None = None
    ) -> list[list[Emitted]]:
        """As of `Engine`; what is before whom is not asked, but neighbours go to one engine."""
        places = dealt(requests, len(self.engines))
        numbers = [self._add(at, one) for at, one in zip(places, requests, strict=True)]
        return to_their_ends(self, numbers, over)

    def _named(self, at: int, one: Emitted) -> Emitted:
        """By the number that all share."""
        names = self._names[at]
        number = names[one.request]
        if one.ended is not None:
            del names[one.request], self._places[number]
        return one._replace(request=number)


def _begun(whose: weakref.ref[Replicas], at: int, numbers: list[int]) -> None:
    """Tell which requests have begun, by the numbers that all share."""
    replicas = whose()
    if replicas is not None:
        replicas.began([replicas._names[at][own] for own in numbers])
