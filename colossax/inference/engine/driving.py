"""Requests brought to their ends, by whatever serves them."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from colossax.scheduling import Emitted, EngineRequest

Over = Callable[[int, int | None], bool]
"""Of a request, by its place among all, and the token that it has just said: whether to end it."""


@runtime_checkable
class Serves(Protocol):
    """An engine, or several that share requests."""

    @property
    def busy(self) -> bool:
        """See `Engine`."""
        ...

    def cancel(self, number: int) -> None:
        """See `Engine`."""
        ...

    def step(self) -> list[Emitted]:
        """See `Engine`."""
        ...


def to_their_ends(
    engine: Serves, numbers: Sequence[int], over: Over | None = None
) -> list[list[Emitted]]:
    """Of each request what was emitted, in the order of their numbers; those that are `over` have
    ended then."""
    order = {number: i for i, number in enumerate(numbers)}
    found: list[list[Emitted]] = [[] for _ in numbers]
    while engine.busy:
        for one in engine.step():
            if (at := order.get(one.request)) is None:
                continue
            found[at].append(one)
            if over is not None and one.ended is None and over(at, one.token):
                engine.cancel(one.request)
    return found


def dealt(requests: Sequence[EngineRequest], count: int) -> list[int]:
    """Which of so many engines each request goes to: neighbours, whose prompts are often alike, to
    one of them, and to each about as many tokens.

    Args:
        requests: One or more.
        count: Of the engines.
    """
    sizes = [len(one.prompt) + one.max_tokens for one in requests]
    share, before, places = sum(sizes) / count, 0, []
    for size in sizes:
        places.append(min(count - 1, int((before + size / 2) / share)))
        before += size
    return places
