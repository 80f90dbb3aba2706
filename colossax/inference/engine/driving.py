"""Requests brought to their ends, by whatever serves them."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from colossax.scheduling import Emitted, EngineRequest


@runtime_checkable
class Serves(Protocol):
    """An engine, or several that share requests."""

    @property
    def busy(self) -> bool:
        """See `Engine`."""
        ...

    def add(self, request: EngineRequest) -> int:
        """See `Engine`."""
        ...

    def step(self) -> list[Emitted]:
        """See `Engine`."""
        ...


def to_their_ends(engine: Serves, requests: Sequence[EngineRequest]) -> list[list[Emitted]]:
    """Of each request what was emitted, in order."""
    order = {engine.add(request): i for i, request in enumerate(requests)}
    found: list[list[Emitted]] = [[] for _ in requests]
    while engine.busy:
        for one in engine.step():
            if one.request in order:
                found[order[one.request]].append(one)
    return found
