"""The engine's own process: requests from a socket, steps, and what they say back."""

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from colossax.errors import InputError
from colossax.scheduling import Emitted, EngineRequest
from colossax.serve.engine.wire import Wire, emitted_to_json, request_from_json

TELL_S = 0.5
"""How often an engine says how it is, with nothing else to say."""

AT_ONCE = 8
"""Messages between two steps: a long prompt takes milliseconds to read."""

COMPILERS, COMPILED_S = 2, 0.01
"""Threads that compile grammars, and how often it is looked whether one has."""


def alone() -> None:
    """Signals of a terminal are the server's, which lets requests finish; its end is this one's.

    Also in the midst of what takes long, as loading.
    """
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def _end_with(server: int) -> None:
    while os.getppid() == server:
        time.sleep(TELL_S)
    os._exit(1)


def run(wire: Wire, engine: Any, constraint: Callable[[str], Any]) -> None:
    """Serve until the server says `close`, or is gone.

    Args:
        wire: To the server.
        engine: An `Engine` whose programs are compiled.
        constraint: Of a request's grammar.
    """
    loop = _Loop(wire, engine, constraint)
    try:
        wire.send({"say": "ready"})
        while loop.turn():
            pass
    except (EOFError, OSError):
        return
    finally:
        loop.end()


class _Loop:
    def __init__(self, wire: Wire, engine: Any, constraint: Callable[[str], Any]):
        self._wire, self._engine, self._constraint = wire, engine, constraint
        self._compiling: dict[int, tuple[EngineRequest, Future[Any]]] = {}
        self._pool = ThreadPoolExecutor(COMPILERS, "grammar")
        self._names: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._told_s, self._heard = 0.0, deque[dict[str, Any]]()
        self._opened: list[int] = []
        engine.began = self._began

    def end(self) -> None:
        """Wait for no grammar."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def turn(self) -> bool:
        """Hear what came, run a step, tell of it; whether to go on."""
        told: list[list[Any]] = []
        wait_s = 0.0 if self._engine.busy or self._heard else TELL_S
        wait_s = min(wait_s, COMPILED_S) if self._compiling else wait_s
        self._heard += self._wire.pending(wait_s)
        now_heard = [self._heard.popleft() for _ in range(min(AT_ONCE, len(self._heard)))]
        self._tell_of("opens", [one["id"] for one in now_heard if one["do"] == "add"])
        for message in now_heard:
            if message["do"] == "close":
                return False
            if message["do"] == "cancel":
                told += self._cancel(message["id"])
            else:
                told += self._add(message["id"], message["request"])
        told += self._compiled()
        self._tell_of("opened", self._opened)
        self._opened = []
        if self._engine.busy:
            told += [self._named(one) for one in self._engine.step()]
        now = time.monotonic()
        if told or now - self._told_s >= TELL_S:
            self._told_s = now
            self._wire.send({"say": "told", "told": told, "stats": self._stats()})
        return True

    def _add(self, name: int, document: dict[str, Any]) -> list[list[Any]]:
        """Hand a request on, one with a grammar when that is compiled, beside the steps."""
        request = request_from_json(document)
        if request.grammar is None:
            return self._handed_on(name, request, None)
        self._compiling[name] = request, self._pool.submit(self._begun, request)
        return []

    def _begun(self, request: EngineRequest) -> Any:
        """The constraint of a request, which has said something already where it is made again."""
        assert request.grammar is not None
        constraint = self._constraint(request.grammar)
        for token in request.generated:
            constraint.took(token)
        return constraint

    def _compiled(self) -> list[list[Any]]:
        """Hand on those whose grammars are compiled."""
        told: list[list[Any]] = []
        for name, (request, future) in list(self._compiling.items()):
            if future.done():
                del self._compiling[name]
                try:
                    told += self._handed_on(name, request, future.result())
                except InputError as problem:
                    told.append(_refused(name, problem))
        return told

    def _handed_on(self, name: int, request: EngineRequest, constraint: Any) -> list[list[Any]]:
        """What is refused is told as its end."""
        try:
            number = self._engine.add(request, constraint)
        except InputError as problem:
            return [_refused(name, problem)]
        self._names[number], self._numbers[name] = name, number
        self._opened.append(name)
        return []

    def _cancel(self, name: int) -> list[list[Any]]:
        if (found := self._compiling.pop(name, None)) is not None:
            found[1].cancel()
            return [emitted_to_json(Emitted(name, ended="cancelled"))]
        number = self._numbers.get(name)
        if number is not None:
            self._engine.cancel(number)
        return []

    def _began(self, numbers: list[int]) -> None:
        """These have a seat from now on."""
        self._tell_of("began", [self._names[number] for number in numbers])

    def _tell_of(self, what: str, names: list[int]) -> None:
        if names:
            self._wire.send({"say": what, "ids": names})

    def _named(self, one: Emitted) -> list[Any]:
        """By the server's number."""
        name = self._names[one.request]
        if one.ended is not None:
            del self._names[one.request], self._numbers[name]
        return emitted_to_json(one._replace(request=name))

    def _stats(self) -> dict[str, Any]:
        found = self._engine.stats
        return {
            **_counts(found),
            "idle": not self._engine.busy and not self._compiling,
            "replicas": [_counts(one) for one in found.each],
        }


def _counts(stats: Any) -> dict[str, int]:
    """Of an engine, as `serve.Stats` names them."""
    found = stats.scheduler
    return {
        "seats_used": found.seats,
        "waiting": found.waiting,
        "pages_free": found.free,
        "pages_used": found.referenced,
        "pages_cached": found.cached,
        "pages_host": found.hosted,
        "host_bytes": stats.host_bytes,
        "pages_out": found.out,
        "pages_back": found.back,
        "prefix_hit_tokens": found.reused,
        "preemptions": found.preemptions,
        "drafted": found.drafted,
        "accepted": found.accepted,
    }


def _refused(name: int, problem: InputError) -> list[Any]:
    return emitted_to_json(Emitted(name, ended="error", message=str(problem)))
