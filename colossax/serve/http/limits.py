"""How much at a time: requests in flight, requests a second, bytes of a body."""

import asyncio
import collections
import contextlib
import time
from collections.abc import Callable, Iterator

from starlette.requests import ClientDisconnect, Request

from colossax.serve.http.errors import Refusal, later, too_large, unavailable
from colossax.serve.options import Limits

_CALLERS = 10_000
"""Callers that are remembered; the one that asked longest ago is forgotten first."""

_READ_BESIDE = 64
"""Requests that may be read and prepared while all that may be inside are."""

_READ_ON_BYTES, _READ_ON_S = 64 << 20, 2.0
"""Of a body that is too large: read and dropped, so that who is still sending it hears why."""


class Doors:
    """Who is inside, and whether anyone may come in.

    Args:
        most: Continuations that may be inside at the same time.

    Attributes:
        inside: Continuations that are being made.
        draining: Whether nobody may come in any more.
        over: Set when those inside have to leave.
    """

    def __init__(self, most: int) -> None:
        self.most, self.inside, self.draining = most, 0, False
        self.over = asyncio.Event()
        self._handled = 0

    @contextlib.contextmanager
    def handling(self) -> Iterator[None]:
        """While a request is read, prepared and perhaps answered; nobody reads all that come.

        Raises:
            Refusal: 503, the server is about to end; 429, there are too many.
        """
        self.check_open()
        if self._handled >= self.most + _READ_BESIDE:
            raise later("too many requests are read; try again later", 1.0, "queue_full")
        self._handled += 1
        try:
            yield
        finally:
            self._handled -= 1

    def check_open(self) -> None:
        """Refuse while the server is about to end.

        Raises:
            Refusal: 503.
        """
        if self.draining:
            raise unavailable("the server is shutting down; ask another one", "draining")

    def enter(self, count: int) -> None:
        """Let continuations in; `leave` has to follow.

        Raises:
            Refusal: 429, there is no room; 503, the server is about to end.
        """
        self.check_open()
        if self.inside + count > self.most:
            raise later(
                f"{self.inside} requests run or wait, and at most {self.most} may; try again later",
                1.0,
                "queue_full",
            )
        self.inside += count

    def leave(self, count: int) -> None:
        """Let them out."""
        self.inside -= count


class Buckets:
    """Requests a second for each caller: a bucket of tokens that fills at a rate.

    Args:
        rate: Tokens a second; None: there is no limit.
        burst: Tokens that a bucket holds.
        clock: Seconds.
    """

    def __init__(
        self, rate: float | None, burst: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._callers: collections.OrderedDict[str, tuple[float, float]] = collections.OrderedDict()

    def take(self, caller: str) -> None:
        """Count a request.

        Raises:
            Refusal: 429, with the seconds after which one more may be made.
        """
        if self._rate is None:
            return
        now = self._clock()
        left, at = self._callers.pop(caller, (float(self._burst), now))
        left = min(self._burst, left + (now - at) * self._rate)
        allowed = left >= 1
        self._callers[caller] = (left - allowed, now)
        if len(self._callers) > _CALLERS:
            self._callers.popitem(last=False)
        if not allowed:
            wait_s = (1 - left) / self._rate
            raise later(
                f"more than {self._rate:g} requests a second; try again in {wait_s:.1f} s",
                wait_s,
                "rate_limit_exceeded",
            )


async def body_of(request: Request, limits: Limits) -> bytes:
    """The body of a request.

    Raises:
        Refusal: 413, it is too large; 408, it takes too long; 499, the client is gone.
    """
    told = request.headers.get("content-length", "")
    most = limits.body_bytes
    refusal = too_large(f"the body is too large; send at most {most} bytes")
    try:
        async with asyncio.timeout(limits.body_s):
            if told.isascii() and told.isdecimal() and int(told[:20]) > most:
                await _drop(request)
                raise refusal
            found = bytearray()
            async for piece in request.stream():
                found += piece
                if len(found) > most:
                    await _drop(request)
                    raise refusal
            return bytes(found)
    except TimeoutError:
        raise Refusal(
            408,
            f"the body did not arrive within {limits.body_s:g} s; send it faster",
            code="request_timeout",
            headers={"Connection": "close"},
        ) from None
    except ClientDisconnect:
        raise gone_away() from None


async def _drop(request: Request) -> None:
    """Read on for a moment: closing on a client that still sends would lose the answer."""
    count = 0
    try:
        async with asyncio.timeout(_READ_ON_S):
            while count < _READ_ON_BYTES:
                message = await request.receive()
                count += len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body"):
                    return
    except TimeoutError:
        return


def gone_away() -> Refusal:
    """499, which nobody reads: the client has left."""
    return Refusal(499, "the client went away", code="client_gone")
