"""An embedder's own process: texts from a socket, steps, and vectors back."""

import base64
import struct
import time
from collections import deque
from typing import Any

from colossax.errors import InputError
from colossax.scheduling import Emitted
from colossax.serve.engine.child import TELL_S
from colossax.serve.engine.wire import Wire, emitted_to_json

AT_ONCE = 512
"""Messages between two steps: enough texts to fill them, and who has much to say waits too."""


def run_embedder(wire: Wire, embedder: Any) -> None:
    """Serve until the server says `close`, or is gone.

    Args:
        wire: To the server.
        embedder: An `Embedder` whose programs are compiled.
    """
    loop = _Loop(wire, embedder)
    try:
        wire.send({"say": "ready"})
        while loop.turn():
            pass
    except (EOFError, OSError):
        return


class _Loop:
    def __init__(self, wire: Wire, embedder: Any):
        self._wire, self._embedder = wire, embedder
        self._names: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._told_s, self._heard = 0.0, deque[dict[str, Any]]()
        embedder.began = self._began

    def turn(self) -> bool:
        """Hear what came, run a step, tell of it; whether to go on."""
        told: list[list[Any]] = []
        found: list[list[Any]] = []
        wait_s = 0.0 if self._embedder.busy or self._heard else TELL_S
        self._heard += self._wire.pending(wait_s)
        for _ in range(min(AT_ONCE, len(self._heard))):
            message = self._heard.popleft()
            if message["do"] == "close":
                return False
            if message["do"] == "cancel":
                told += self._cancel(message["id"])
            else:
                told += self._add(message["id"], message["text"])
        if self._embedder.busy:
            for one in self._embedder.step():
                name = self._forget(one.number)
                if one.vector is None:
                    told.append(_refused(name, one.message))
                else:
                    found.append([name, vector_to_text(one.vector)])
        now = time.monotonic()
        if told or found or now - self._told_s >= TELL_S:
            self._told_s = now
            message = {"say": "told", "told": told, "found": found, "stats": self._stats()}
            self._wire.send(message)
        return True

    def _add(self, name: int, text: list[int]) -> list[list[Any]]:
        """What is refused is told as its end."""
        try:
            number = self._embedder.add(text)
        except InputError as problem:
            return [_refused(name, str(problem))]
        self._names[number], self._numbers[name] = name, number
        return []

    def _cancel(self, name: int) -> list[list[Any]]:
        number = self._numbers.get(name)
        if number is None:
            return []
        self._embedder.cancel(number)
        self._forget(number)
        return [emitted_to_json(Emitted(name, ended="cancelled"))]

    def _forget(self, number: int) -> int:
        """The server's number of a text that is over."""
        name = self._names.pop(number)
        del self._numbers[name]
        return name

    def _began(self, numbers: list[int]) -> None:
        """These are in a step from now on."""
        self._wire.send({"say": "began", "ids": [self._names[number] for number in numbers]})

    def _stats(self) -> dict[str, Any]:
        found = self._embedder.stats
        idle = not self._embedder.busy
        return {"seats_used": found.reading, "waiting": found.waiting, "idle": idle}


def _refused(name: int, message: str) -> list[Any]:
    return emitted_to_json(Emitted(name, ended="error", message=message))


def vector_to_text(vector: Any) -> str:
    """float32 numbers in base64."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def vector_from_text(text: str) -> list[float]:
    """What `vector_to_text` made."""
    found = base64.b64decode(text)
    return list(struct.unpack(f"<{len(found) // 4}f", found))
