"""The last continuations as they went: times and numbers, nothing of what was said."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

KEPT = 200
"""Continuations that are remembered."""


class Record:
    """One continuation as it goes.

    Args:
        records: That it belongs to.
        number: Its, counted from 1.
        prompt_tokens: Of its prompt.
        asked_s: When it was asked for, by the clock of `records`.
    """

    def __init__(self, records: "Records", number: int, prompt_tokens: int, asked_s: float) -> None:
        self._records, self.number, self.prompt_tokens = records, number, prompt_tokens
        self.asked_s, self.tokens = asked_s, 0
        self.seated_s: float | None = None
        self.first_s: float | None = None
        self.ended_s: float | None = None
        self.end: str | None = None

    def seated(self) -> None:
        """It got a seat; what happens again after a preemption does not count."""
        if self.seated_s is None:
            self.seated_s = self._records.now()

    def token(self) -> None:
        """It said a token."""
        if self.first_s is None:
            self.first_s = self._records.now()
        self.tokens += 1
        self._records.tokens += 1

    def ended(self, end: str) -> None:
        """It is over: `stop`, `length`, `cancelled` or `error`."""
        self.end, self.ended_s = end, self._records.now()

    def told(self) -> dict[str, Any]:
        """As JSON has it; times in seconds since the server began."""
        return {
            "number": self.number,
            "prompt_tokens": self.prompt_tokens,
            "tokens": self.tokens,
            "asked_s": self._since(self.asked_s),
            "seated_s": self._since(self.seated_s),
            "first_s": self._since(self.first_s),
            "ended_s": self._since(self.ended_s),
            "end": self.end,
        }

    def _since(self, at: float | None) -> float | None:
        return None if at is None else round(at - self._records.began_s, 4)


class Records:
    """All continuations in numbers, and the last of them one by one.

    Args:
        now: A clock, in seconds.

    Attributes:
        began_s: When it began.
        requests: Continuations that an engine took.
        prompt_tokens: Of their prompts.
        tokens: That were said.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now, self.began_s = now, now()
        self.requests = self.prompt_tokens = self.tokens = 0
        self._kept: deque[Record] = deque(maxlen=KEPT)

    def begin(self, asked_s: float, prompt_tokens: int) -> Record:
        """An engine took one that was asked for at this time."""
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        record = Record(self, self.requests, prompt_tokens, asked_s)
        self._kept.append(record)
        return record

    def told(self) -> dict[str, Any]:
        """As JSON has it, the oldest first; `up_s` is now, by the clock of all times in it."""
        return {
            "up_s": round(self.now() - self.began_s, 4),
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "tokens": self.tokens,
            "last": [record.told() for record in self._kept],
        }
