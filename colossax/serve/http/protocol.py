"""HTTP below the application: heads that are too large or too slow, connections that are cut."""

import asyncio
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from colossax.serve.http.answers import dumped
from colossax.serve.http.errors import Refusal


def protocol(head_s: float) -> type[H11Protocol]:
    """The protocol of a server.

    Args:
        head_s: Seconds that the head of a request may take to arrive.
    """

    class Protocol(H11Protocol):
        """Refuses in the form of all refusals, and lets a request cut its own connection."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # pyrefly: ignore
            super().connection_made(transport)
            self.app_state = {**self.app_state, "abort": transport.abort}
            self._await_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if not self._is_late():
                self._stop_waiting()
            elif self._head_timer is None:
                self._await_head()

        def _is_late(self) -> bool:
            """Whether a head is in part there, or a body that was answered without it."""
            answered = self.cycle is not None and self.cycle.response_complete
            return self.conn.their_state is h11.IDLE or (
                answered and self.conn.their_state is h11.SEND_BODY
            )

        def send_400_response(self, msg: str) -> None:
            """Refuse what is no HTTP, or too much of it."""
            status = getattr(sys.exc_info()[1], "error_status_hint", 400)
            refusal = _refusal(status)
            body = dumped(refusal.body())
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                start = h11.Response(status_code=refusal.status, headers=headers)
                for event in (start, h11.Data(data=body), h11.EndOfMessage()):
                    self.transport.write(self.conn.send(event) or b"")
            self.transport.close()

        def _await_head(self) -> None:
            self._head_timer = self.loop.call_later(head_s, self.transport.close)

        def _stop_waiting(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

    return Protocol


def _refusal(status: int) -> Refusal:
    if status == 431:
        return Refusal(
            431, "the request's headers are too large; send fewer", code="headers_too_large"
        )
    return Refusal(400, "the request is no valid HTTP; use an HTTP client", code="invalid_http")
