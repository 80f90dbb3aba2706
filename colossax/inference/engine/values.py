"""What an engine is asked with and tells of itself."""

import dataclasses
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import numpy as np

from colossax.errors import InputError
from colossax.inference.engine.sampling import Chosen
from colossax.scheduling import Emitted, Ended, EngineRequest
from colossax.scheduling import Stats as SchedulerStats

NOT_SOUND = "the model gave numbers that are no logits (NaN or infinite) for this request"
CONFINED = "no token of the vocabulary goes on what the request's grammar allows"


@runtime_checkable
class Constraint(Protocol):
    """Which tokens may come next, such as those that a grammar allows."""

    def mask(self) -> np.ndarray:
        """A bit for each token, `[ceil(vocab / 32)]` uint32, from the lowest of the first word."""
        ...

    def took(self, token: int) -> None:
        """Go on with this token."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineStats:
    """What an engine has done and holds.

    Attributes:
        steps: Run, by kind.
        scheduler: Of its seats, pages and queue.
        host_bytes: Of its pages in the memory of this process's host.
        each: Where several engines share requests, of each of them; else empty.
    """

    steps: Mapping[str, int]
    scheduler: SchedulerStats
    host_bytes: int = 0
    each: tuple["EngineStats", ...] = ()


def check_waits(request: EngineRequest, constraint: Constraint | None) -> None:
    """Refuse a constraint whose request does not wait for its tokens, and the other way round.

    Raises:
        InputError: With what to give.
    """
    if (constraint is not None) != request.waits:
        raise InputError(
            "constraint: it needs each token before the next; give it with waits=True, and waits"
            " only with it"
        )


def emitted_of(
    number: int, at: tuple[int, int], found: Chosen, logprobs: int | None, last: Ended | None
) -> Emitted:
    """What is told of a token.

    Args:
        number: Of the request.
        at: Its seat, and which of the tokens that were said at once.
        found: Of the step.
        logprobs: How many of the likeliest are asked for; None: not even the token's own.
        last: Its end, where this is the last token.
    """
    logprob, top = None, ()
    if logprobs is not None:
        logprob = float(found.logprob[at])
        pairs = zip(found.top_tokens[at], found.top_logprobs[at], strict=True)
        top = tuple((int(t), float(p)) for t, p in pairs if t >= 0)[:logprobs]
    reason = None if last is None else last.reason
    return Emitted(number, token=int(found.token[at]), logprob=logprob, top=top, ended=reason)
