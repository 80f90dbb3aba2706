"""JSON messages between processes."""

import json
import socket
from typing import Any

MAX_MESSAGE_BYTES = 64 * 2**20


class Wire:
    """JSON messages over one connection, one a line."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self._buffer = b""

    def send(self, message: dict[str, Any]) -> None:
        """Send one message."""
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """The next message; None when the other side is gone or sends something else.

        Raises:
            TimeoutError: Nothing whole came in time.
        """
        self.connection.settimeout(timeout_s)
        while b"\n" not in self._buffer:
            if not self._read():
                return None
        return self._next()

    def arrived(self) -> list[dict[str, Any] | None]:
        """Messages that can be read without waiting, None last when the other side is gone."""
        alive = self._read()
        return self.buffered() if alive else [*self.buffered(), None]

    def buffered(self) -> list[dict[str, Any] | None]:
        """Messages that have been read already."""
        messages = []
        while b"\n" in self._buffer:
            messages.append(self._next())
        return messages

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def _read(self) -> bool:
        try:
            data = self.connection.recv(65_536)
        except TimeoutError:
            raise
        except OSError:
            return False
        self._buffer += data
        return bool(data) and len(self._buffer) <= MAX_MESSAGE_BYTES

    def _next(self) -> dict[str, Any] | None:
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            message = json.loads(line)
        except ValueError:
            return None
        return message if isinstance(message, dict) else None
