"""An engine in a process of its own, started again when it dies: requests go on where they were."""

import asyncio
import contextlib
import dataclasses
import itertools
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

from colossax.errors import InputError
from colossax.scheduling import Emitted, EngineRequest
from colossax.serve.backend import EngineDown, Facts, Started, Stats
from colossax.serve.engine.embedding import vector_from_text
from colossax.serve.engine.handing import Handing
from colossax.serve.engine.journal import Journal
from colossax.serve.engine.line import Line
from colossax.serve.engine.patience import Patience
from colossax.serve.engine.told import facts_of, said_by, vector_by
from colossax.serve.engine.wire import emitted_from_json, request_to_json, waited_for
from colossax.serve.engine.writing import Writer

CLOSE_S, ENDS_S = 5.0, 1.0
PAUSE_S, LONGEST_PAUSE_S = 0.2, 30.0
"""Between starts; doubled each time that an engine died before it was ready."""


@dataclasses.dataclass(kw_only=True)
class _Live:
    """A request that has not ended."""

    request: EngineRequest | None = None
    """None: a vector of `text` is wanted."""
    text: tuple[int, ...] = ()
    said: list[int] = dataclasses.field(default_factory=list)
    told: asyncio.Queue[Any] = dataclasses.field(default_factory=asyncio.Queue)
    """Of `Emitted`; of a text, at last its vector."""
    gone: bool = False
    """Whether nobody wants it any more."""


class Supervisor:
    """A `Backend` whose engine is a child process.

    The child gets the number of a socket as its last argument; it says `facts` or `refused` first,
    then `ready`, then what it tells of requests. One that dies, or says nothing for `hang_s` while
    it has something to do, is started again, and each request goes on with what it has said as
    `generated`: seeds and positions decide a draw, so its tokens are those it would have had.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        journal: Journal | None = None,
        hang_s: float = 120.0,
        tell: Callable[[str], None] = lambda _line: None,
    ):
        """Start the engine, and wait for what it says of its model.

        Args:
            command: Of the child.
            journal: What is under way, on disk.
            hang_s: Longest step, and longest silence.
            tell: Lines for people.

        Raises:
            InputError: The child refuses what it was asked for.
            RuntimeError: It ended without a word.
        """
        self._command = list(command)
        self._journal = None if journal is None else Writer(journal)
        self._hang_s, self._tell = hang_s, tell
        self._live: dict[int, _Live] = {}
        self._handing = Handing()
        self._numbers = itertools.count()
        self._stats, self._heard_s = Stats(), time.monotonic()
        self._ready = self._closing = False
        self._line: Line | None = None
        self._patience, self._last_words, self._failed = Patience(), "", ""
        self._ready_s = time.monotonic()
        self._watching: asyncio.Task[None] | None = None
        self._child, self._sock = self._started()
        try:
            first = self._first()
        except BaseException:
            self._kill()
            self._sock.close()
            raise
        # A later engine is told what "the latest" was.
        self._command[-1:-1] = first.get("again", ())
        self._facts = facts_of(first["facts"])

    @property
    def facts(self) -> Facts:
        """See `Backend`."""
        return self._facts

    @property
    def pid(self) -> int:
        """Of the engine's process, as it is now."""
        return self._child.pid

    async def start(self) -> None:
        """See `Backend`."""
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """See `Backend`; the journal goes."""
        self._closing = True
        self._send({"do": "close"})
        if self._watching is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._watching), CLOSE_S)
            self._kill()
            with contextlib.suppress(asyncio.CancelledError):
                self._watching.cancel()
                await self._watching
        await asyncio.to_thread(self._child.wait)
        if self._journal is not None:
            await asyncio.to_thread(self._journal.close)

    def abandon(self) -> None:
        """Leave nothing behind, whether it was started and closed or not."""
        self._kill()
        self._child.wait()
        self._sock.close()
        if self._journal is not None:
            self._journal.close()

    async def submit(self, request: EngineRequest) -> Started:
        """See `Backend`."""
        request.check(vocab=self._facts.vocab, slots=self._facts.slots)
        number = next(self._numbers)
        if self._journal is not None and not self._ended:
            try:
                await self._journal.begin(number, request_to_json(request))
            except OSError as problem:
                self._tell(f"the journal cannot be written: {problem}; a request was turned away")
                raise EngineDown from problem
        if self._ended:
            raise EngineDown
        live = _Live(request=request, said=list(request.generated))
        self._accept(number, live)
        return Started(number=number, said=said_by(live.told))

    def _accept(self, number: int, live: _Live) -> None:
        self._live[number] = live
        if self._ready:
            self._hand(self._handing.add(number))

    def cancel(self, number: int) -> None:
        """See `Backend`."""
        live = self._live.get(number)
        if live is None:
            return
        live.gone = True
        if self._ready and self._handing.has(number):
            self._send({"do": "cancel", "id": number})
        else:
            self._hear([Emitted(number, ended="cancelled")])

    async def embed(self, prompts: Sequence[tuple[int, ...]]) -> list[list[float]]:
        """See `Backend`; an engine that dies is asked anew for what it has not told."""
        if not self._facts.embeds:
            raise InputError("model: it tells no embeddings; ask for a continuation")
        if self._ended:
            raise EngineDown
        asked = {next(self._numbers): _Live(text=prompt) for prompt in prompts}
        for number, live in asked.items():
            self._accept(number, live)
        try:
            return [await vector_by(live.told) for live in asked.values()]
        except BaseException:
            for number in asked:
                self.cancel(number)
            raise

    def stats(self) -> Stats:
        """See `Backend`."""
        since = 0.0 if self._stats.idle and not self._live else time.monotonic() - self._heard_s
        return dataclasses.replace(self._stats, since_step_s=since, failed=self._failed)

    def ready(self) -> bool:
        """See `Backend`."""
        return self._ready

    @property
    def _ended(self) -> bool:
        """Whether nobody is taken any more."""
        return self._closing or bool(self._failed)

    def _first(self) -> dict[str, Any]:
        """What the first engine says first: facts, and words for those that come after it."""
        try:
            first = waited_for(self._sock)
            if "facts" in first:
                return first
        except EOFError:
            first = {}
        self._sock.close()
        code = self._child.wait()
        if "refused" in first:
            raise InputError(first["refused"])
        words = f": {first['words']}" if "words" in first else ""
        raise RuntimeError(f"the engine's process ended with {code} before it began{words}")

    def _started(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            command = [*self._command, str(number)]
            child = subprocess.Popen(command, pass_fds=[number], start_new_session=True)
        return child, ours

    async def _watch(self) -> None:
        """Follow engine after engine."""
        pause_s = PAUSE_S
        while True:
            line = self._line = Line(self._sock)
            try:
                await line.open()
                code = await self._follow(line)
            finally:
                line.close()
            was_ready, self._ready, self._line = self._ready, False, None
            self._stats = Stats()
            if self._closing:
                return
            pause_s = PAUSE_S if was_ready else min(2 * pause_s, LONGEST_PAUSE_S)
            if self._mourn(code, time.monotonic() - self._ready_s if was_ready else 0.0):
                return
            await asyncio.sleep(pause_s)
            self._heard_s = time.monotonic()
            while not await self._start_again():
                await asyncio.sleep(pause_s)

    async def _start_again(self) -> bool:
        """Whether an engine's process could be made."""
        try:
            self._child, self._sock = self._started()
        except OSError as problem:
            self._tell(f"no engine can be started ({problem}); it is tried again")
            return False
        return True

    async def _follow(self, line: Line) -> int:
        """Hear an engine until it is gone, and its last words; the exit code."""
        hanging = asyncio.create_task(self._end_hanging())
        try:
            while True:
                self._take(await line.received())
        except EOFError:
            code = await asyncio.to_thread(self._exit_code)
        finally:
            hanging.cancel()
        for message in line.rest():
            self._take(message)
        return code

    def _take(self, message: dict[str, Any]) -> None:
        """What an engine says."""
        self._heard_s = time.monotonic()
        match message["say"]:
            case "ready":
                self._ready, self._ready_s, self._last_words = True, self._heard_s, ""
                self._hand(self._handing.begin(self._live))
            case "refused":
                self._last_words = message["refused"]
                self._tell(self._last_words)
            case "dying":
                self._last_words = message["words"]
            case "told":
                self._stats = Stats(**message["stats"])
                self._hear([emitted_from_json(one) for one in message["told"]])
                for number, vector in message.get("found", ()):
                    self._found(number, vector_from_text(vector))
            case "opens" | "opened" | "began" as what:
                known = [number for number in message["ids"] if number in self._live]
                for number in known:
                    getattr(self._handing, what)(number)
                    if what == "began":
                        self._live[number].told.put_nowait(Emitted(number))

    def _exit_code(self) -> int:
        """Of an engine that is gone, as it ends by itself if it does so soon."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._child.wait(ENDS_S)
        self._kill()
        return self._child.wait()

    def _hand(self, numbers: Sequence[int]) -> None:
        """Give the engine these requests, with all that they have said."""
        for number in numbers:
            live = self._live[number]
            if live.request is None:
                self._send({"do": "embed", "id": number, "text": live.text})
                continue
            again = dataclasses.replace(live.request, generated=tuple(live.said))
            self._send({"do": "add", "id": number, "request": request_to_json(again)})

    def _hear(self, told: list[Emitted]) -> None:
        """Hand on what requests were told, and write it down."""
        said: dict[int, list[int]] = {}
        ended = []
        for one in told:
            live = self._live.get(one.request)
            if live is None:
                continue
            if one.token is not None:
                self._patience.served()
                live.said.append(one.token)
                said.setdefault(one.request, []).append(one.token)
            if one.ended is not None:
                del self._live[one.request]
                ended.append(one.request)
            live.told.put_nowait(one)
            if not self._handing.has(one.request):
                self._handing.left(one.request)
            elif one.token is not None or one.ended is not None:
                self._hand(self._handing.said(one.request, ended=one.ended is not None))
        if self._journal is not None and (said or ended):
            self._journal.told(said, ended)

    def _found(self, number: int, vector: list[float]) -> None:
        """Hand on a text's vector."""
        live = self._live.pop(number, None)
        if live is not None:
            live.told.put_nowait(vector)
            self._hand(self._handing.said(number, ended=True))

    def _mourn(self, code: int, ready_s: float) -> bool:
        """Tell of an engine's death, and end the requests that saw too many; whether it was the
        last."""
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        blames = self._handing.blames
        message = "the engine ended each time that it ran this request; it is not tried again"
        given_up = [Emitted(n, ended="error", message=message) for n in self._handing.died()]
        gone = [Emitted(n, ended="cancelled") for n, live in self._live.items() if live.gone]
        self._hear([*given_up, *gone])
        if self._patience.died(blamed=blames, ready_s=ready_s):
            self._give_up(how)
            return True
        running = len(self._live)
        self._tell(f"the engine ended {how}; it is started again, and {running} requests go on")
        return False

    def _give_up(self, how: str) -> None:
        """End all requests: no engine will serve them."""
        words = f"; its last words: {self._last_words}" if self._last_words else ""
        self._failed = (
            f"the engine ended {self._patience.deaths} times in a row before it said a token, at"
            f" last {how}{words}"
        )
        self._tell(self._failed)
        self._hear([Emitted(n, ended="error", message=self._failed) for n in self._live])

    async def _end_hanging(self) -> None:
        """Kill an engine that says nothing for too long while it has something to do."""
        while True:
            await asyncio.sleep(self._hang_s / 10)
            silent_s = time.monotonic() - self._heard_s
            if self._ready and silent_s > self._hang_s:
                self._tell(f"the engine has said nothing for {silent_s:.0f} s; it is ended")
                self._kill()

    def _send(self, message: dict[str, Any]) -> None:
        if self._line is not None:
            self._line.send(message)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._child.kill()
