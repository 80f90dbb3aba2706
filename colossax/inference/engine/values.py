"""What an engine is asked with and tells of itself."""

import dataclasses
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import numpy as np

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
        each: Where several engines share requests, of each of them; else empty.
    """

    steps: Mapping[str, int]
    scheduler: SchedulerStats
    each: tuple["EngineStats", ...] = ()
