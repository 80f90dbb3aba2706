"""The server's end of the socket to its engine's process."""

import asyncio
import contextlib
import socket
from typing import Any

from colossax.serve.engine.wire import packed, whole

_CHUNK_BYTES = 1 << 16


class Line(asyncio.Protocol):
    """Messages both ways; what the engine said before it died is heard, whatever was written then.

    asyncio's streams give up what has come where writing fails, as it does to an engine that has
    just died: its last words, of which request it was running, would be lost.
    """

    def __init__(self, sock: socket.socket):
        """Of a connected socket; `open` begins."""
        self._sock, self._again = sock, sock.dup()
        self._again.setblocking(False)
        self._held = bytearray()
        self._heard: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._transport: asyncio.WriteTransport | None = None

    async def open(self) -> None:
        """Hear from now on."""
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(lambda: self, sock=self._sock)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._held += data
        for message in whole(self._held):
            self._heard.put_nowait(message)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._heard.put_nowait(None)

    async def received(self) -> dict[str, Any]:
        """The next message.

        Raises:
            EOFError: The other side is gone, or cannot be written to; see `rest`.
        """
        message = await self._heard.get()
        if message is None:
            raise EOFError
        return message

    def send(self, message: dict[str, Any]) -> None:
        """Write one; does nothing where the other side is gone."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(packed(message))

    def rest(self) -> list[dict[str, Any]]:
        """What the other side, which has ended, said and nobody has heard."""
        with contextlib.suppress(OSError):
            while came := self._again.recv(_CHUNK_BYTES):
                self._held += came
        return whole(self._held)

    def close(self) -> None:
        """Hear no more."""
        if self._transport is not None:
            self._transport.close()
        self._again.close()
