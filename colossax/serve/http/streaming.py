"""Answers in pieces: to clients that read slowly, not at all, or leave."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from starlette.responses import Response

from colossax.serve.http.answers import event
from colossax.serve.http.errors import Refusal, internal, unavailable
from colossax.serve.http.limits import Doors, gone_away
from colossax.serve.http.metrics import Receive, Scope, Send
from colossax.serve.options import Limits

LOG = logging.getLogger("colossax.serve")

T = TypeVar("T")
_LAST_WORDS_S = 2.0
"""For the last event of a stream that the server ends itself."""


class Outbox:
    """What waits for one client: put in by whoever makes it, taken out as it reads.

    Args:
        limit_bytes: Most that waits.

    Attributes:
        overflowed: Set when more would have waited; what came then is lost.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit, self._size = limit_bytes, 0
        self._waiting: list[bytes] = []
        self._closed, self._something = False, asyncio.Event()
        self.overflowed = asyncio.Event()

    def put(self, piece: bytes, *, counted: bool = True) -> None:
        """Add a piece; after the end it is lost.

        Args:
            piece: Of the answer.
            counted: Whether the limit is of it too; not of what a client sent itself.
        """
        if self._closed:
            return
        size = len(piece) if counted else 0
        if self._size + size > self._limit:
            self.overflowed.set()
            return
        self._waiting.append(piece)
        self._size += size
        self._something.set()

    def close(self) -> None:
        """Nothing more comes."""
        self._closed = True
        self._something.set()

    async def take(self) -> bytes | None:
        """All that waits, once there is something; None at the end."""
        await self._something.wait()
        if not self._waiting:
            return None
        found = b"".join(self._waiting)
        self._waiting, self._size = [], 0
        if not self._closed:
            self._something.clear()
        return found


async def ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """End tasks and wait until they have."""
    some = list(tasks)
    for task in some:
        task.cancel()
    await asyncio.gather(*some, return_exceptions=True)


async def gone(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_there(work: Coroutine[Any, Any, T], receive: Receive, doors: Doors) -> T:
    """What `work` returns, unless the client leaves or the server has to end before.

    Raises:
        Refusal: 499 or 503; `work` is cancelled and has ended.
    """
    working = asyncio.create_task(work)
    leaving, over = asyncio.create_task(gone(receive)), asyncio.create_task(doors.over.wait())
    try:
        await asyncio.wait({working, leaving, over}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise gone_away() if leaving.done() else shut_down()
    finally:
        await ended((working, leaving, over))


def shut_down() -> Refusal:
    """503: the time to finish is over."""
    return unavailable("the server is shutting down and the time to finish is over", "draining")


class EventStream(Response):
    """Server-sent events as they are made.

    A client that does not read for `stall_s`, or lets more than `buffer_bytes` wait, is dropped:
    its connection is cut, and what it had asked for is given up. Nobody else waits for it.

    Args:
        produce: Puts events in; a `Refusal` becomes the last one.
        limits: Of time and bytes.
        doors: Say when the server has to end.
        dropped: Is told why a stream ended early: `slow` or `gone`.
        finish: Called at the end, whatever it was.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        produce: Callable[[Outbox], Awaitable[None]],
        *,
        limits: Limits,
        doors: Doors,
        dropped: Callable[[str], None],
        finish: Callable[[], None],
    ) -> None:
        super().__init__(None, 200, {"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._make, self._limits, self._doors = produce, limits, doors
        self._dropped, self._finish = dropped, finish

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it all."""
        try:
            await self._run(scope, receive, send)
        finally:
            self._finish()

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        outbox = Outbox(self._limits.buffer_bytes)
        making = asyncio.create_task(self._made(outbox))
        sending = asyncio.create_task(self._send(outbox, send))
        leaving = asyncio.create_task(gone(receive))
        full = asyncio.create_task(outbox.overflowed.wait())
        over = asyncio.create_task(self._doors.over.wait())
        try:
            await asyncio.wait({sending, leaving, full, over}, return_when=asyncio.FIRST_COMPLETED)
            if over.done() and not (sending.done() or leaving.done() or full.done()):
                outbox.put(event(shut_down().body()))
                outbox.close()
                await asyncio.wait({sending}, timeout=_LAST_WORDS_S)
            if sending.done() and not sending.exception():
                return
            self._dropped("gone" if leaving.done() else "slow")
            cut(scope)
        finally:
            await ended((making, sending, leaving, full, over))

    async def _made(self, outbox: Outbox) -> None:
        try:
            await self._make(outbox)
        except Refusal as refusal:
            outbox.put(event(refusal.body()))
        except asyncio.CancelledError:
            raise
        except Exception:  # noqa: BLE001 (the client hears of it in the stream, the log has it)
            LOG.exception("a stream failed")
            outbox.put(event(internal().body()))
        finally:
            outbox.close()

    async def _send(self, outbox: Outbox, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        while (piece := await outbox.take()) is not None:
            async with asyncio.timeout(self._limits.stall_s):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        async with asyncio.timeout(self._limits.stall_s):
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def cut(scope: Scope) -> None:
    """Cut the connection of a request: closing it would wait for the client to read."""
    abort = scope.get("state", {}).get("abort")
    if abort is not None:
        abort()
