"""Messages between a server and its engine's process: JSON, each behind its length."""

import json
import select
import socket
import struct
from typing import Any

from colossax.scheduling import Emitted, EngineRequest, Keep, SamplingConfig

_LENGTH = struct.Struct(">I")

_TOKENS = ("prompt", "generated", "source", "ends")


def packed(message: dict[str, Any]) -> bytes:
    """A message as it is sent."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


def whole(held: bytearray) -> list[dict[str, Any]]:
    """The messages that have come, which are taken off; what is left is the next one's part."""
    found, at = [], 0
    while len(held) - at >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(held, at)
        end = at + _LENGTH.size + length
        if len(held) < end:
            break
        found.append(json.loads(held[at + _LENGTH.size : end]))
        at = end
    del held[:at]
    return found


def waited_for(sock: socket.socket) -> dict[str, Any]:
    """The next message, for which all else waits.

    Raises:
        EOFError: The other side is gone.
    """
    (length,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size))
    return json.loads(_exactly(sock, length))


def _exactly(sock: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        came = sock.recv(count - len(found))
        if not came:
            raise EOFError
        found += came
    return found


class Wire:
    """The engine's end: it waits for nothing while there are steps to run."""

    def __init__(self, sock: socket.socket):
        """Over a connected socket, which blocks."""
        self._sock = sock
        self._held = bytearray()
        self._poll = select.poll()  # the server's number of the socket may be any
        self._poll.register(sock, select.POLLIN)

    def send(self, message: dict[str, Any]) -> None:
        """Raises `OSError` where the server is gone."""
        self._sock.sendall(packed(message))

    def pending(self, wait_s: float) -> list[dict[str, Any]]:
        """All that has come; waits for something, at most so long.

        Raises:
            EOFError: The server is gone.
        """
        found = whole(self._held)
        while not found and self._poll.poll(1000 * wait_s):
            self._read()
            found = whole(self._held)
        while self._poll.poll(0):
            self._read()
            found += whole(self._held)
        return found

    def _read(self) -> None:
        came = self._sock.recv(1 << 16)
        if not came:
            raise EOFError
        self._held += came


def request_to_json(request: EngineRequest) -> dict[str, Any]:
    """As a message holds it."""
    keep = None if request.keep is None else vars(request.keep)
    # Tuples are written as they are.
    return {**vars(request), "sampling": vars(request.sampling), "keep": keep}


def request_from_json(document: dict[str, Any]) -> EngineRequest:
    """What `request_to_json` made."""
    sampling = document["sampling"]
    biases = tuple((token, bias) for token, bias in sampling["logit_bias"])
    of_tokens = {name: tuple(document[name]) for name in _TOKENS}
    drawn: dict[str, Any] = {**sampling, "logit_bias": biases}
    given: dict[str, Any] = {**document, **of_tokens, "sampling": SamplingConfig(**drawn)}
    given["keep"] = None if document["keep"] is None else Keep(**document["keep"])
    return EngineRequest(**given)


def emitted_to_json(one: Emitted) -> list[Any]:
    """Likewise."""
    return list(one)


def emitted_from_json(document: list[Any]) -> Emitted:
    """Likewise."""
    request, token, logprob, top, ended, message, scores = document
    return Emitted(
        request=request,
        token=token,
        logprob=logprob,
        top=tuple((token, p) for token, p in top),
        ended=ended,
        message=message,
        scores=tuple((p, tuple((t, q) for t, q in top)) for p, top in scores),
    )
