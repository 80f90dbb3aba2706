"""One continuation: from tokens that an engine says to parts of an answer."""

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from colossax.data import Tokenizer
from colossax.errors import InputError
from colossax.scheduling import Emitted
from colossax.serve.backend import Backend, EngineDown, EngineFailed, EngineFull, Started
from colossax.serve.http.calling import CallFinder, CallPart
from colossax.serve.http.echoing import NOTHING, Echo
from colossax.serve.http.errors import Refusal, bad, internal, later, unavailable
from colossax.serve.http.preparing import Wanted
from colossax.serve.http.records import Record
from colossax.serve.text import Entry, Telling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a continuation.

    Attributes:
        text: What it adds.
        entries: Tokens whose text is told with it, where log-probabilities were asked for.
        tokens: Tokens that the engine has said for this continuation so far.
        finish: `stop`, `length` or `tool_calls` with the last part; None before.
        calls: What it adds to calls of functions.
    """

    text: str = ""
    entries: tuple[Entry, ...] = ()
    tokens: int = 0
    finish: str | None = None
    calls: tuple[CallPart, ...] = ()


class Clock:
    """Tells when tokens of one continuation came.

    Args:
        since: When it was asked for, by `time.monotonic`.
        record: Keeps it.
        first: Is told the seconds from then to the first token.
        between: Is told those between a token and the next.
    """

    def __init__(
        self,
        since: float,
        record: Record,
        first: Callable[[float], None],
        between: Callable[[float], None],
    ) -> None:
        self.record, self._first, self._between = record, first, between
        self._last, self._any = since, False

    def tick(self) -> None:
        """A token came."""
        now = time.monotonic()
        (self._between if self._any else self._first)(now - self._last)
        self._last, self._any = now, True
        self.record.token()


async def submitted(backend: Backend, wanted: Sequence[Wanted]) -> list[Started]:
    """Hand all to the engine, or none.

    Raises:
        Refusal: 400, 429 or 503, as the engine says.
    """
    taken: list[Started] = []
    try:
        for one in wanted:
            taken.append(await backend.submit(one.request))
            await asyncio.sleep(0)  # others have their turns between long prompts
    except BaseException as problem:
        for one in taken:
            backend.cancel(one.number)
        if isinstance(problem, _SAID):
            raise refusal_of(problem) from None
        raise
    return taken


_SAID = (InputError, EngineFull, EngineDown)


def refusal_of(problem: Exception) -> Refusal:
    """What a client is told of what an engine raised."""
    if isinstance(problem, InputError):
        return bad(str(problem))
    if isinstance(problem, EngineFull):
        return later("too many requests wait; try again later", 1.0, "queue_full")
    if isinstance(problem, EngineFailed):
        return _engine_error(str(problem))
    return unavailable("the model does not run at this moment; try again later", "engine_down")


async def parts(
    backend: Backend,
    started: Started,
    tokenizer: Tokenizer,
    stops: Sequence[str],
    *,
    clock: Clock,
    echo: Echo = NOTHING,
) -> AsyncGenerator[Part, None]:
    """The parts of one continuation as they come; the engine is told when nobody wants the rest.

    Raises:
        Refusal: The engine ended it otherwise than by its end or length.
    """
    telling, count, ended, end = Telling(tokenizer, stops), 0, False, "cancelled"
    try:
        if echo.text and not echo.scored:
            yield Part(text=echo.text)
        async for emitted in started.said:
            ended = emitted.ended is not None
            if emitted.token is not None:
                clock.tick()
                count += 1
            elif not ended:
                clock.record.seated()
                continue
            if count == 1 and (echoed := _echoed(echo, tokenizer, emitted)) is not None:
                end = echoed.finish or end
                yield echoed
                if echoed.finish:
                    return
            text, entries = _told(telling, emitted)
            if telling.stopped or ended:
                _check_end(emitted, telling)
                rest, last = telling.finish()
                finish = "length" if emitted.ended == "length" and not telling.stopped else "stop"
                end, entries = finish, echo.behind((*entries, *last))
                yield Part(text=text + rest, entries=entries, tokens=count, finish=finish)
                return
            if text or entries:
                yield Part(text=text, entries=echo.behind(entries), tokens=count)
        ended = True
        raise unavailable("the model went away before the end; try again later", "engine_down")
    except Exception:
        end = "error"
        raise
    finally:
        clock.record.ended(end)
        if not ended:
            backend.cancel(started.number)


def _echoed(echo: Echo, tokenizer: Tokenizer, emitted: Emitted) -> Part | None:
    """What the first token brings of its prompt; with an end where nothing is told behind it."""
    if emitted.token is None or not (echo.scored or echo.alone):
        return None
    text, finish = echo.text if echo.scored else "", "length" if echo.alone else None
    return Part(text=text, entries=echo.entries(tokenizer, emitted), finish=finish)


def _told(telling: Telling, emitted: Emitted) -> tuple[str, tuple[Entry, ...]]:
    """What a token adds; the one that ends a continuation is no text."""
    if emitted.token is None or emitted.ended == "stop":
        return "", ()
    return telling.push(emitted.token, emitted.logprob, emitted.top)


def _check_end(emitted: Emitted, telling: Telling) -> None:
    if telling.stopped or emitted.ended in ("stop", "length"):
        return
    if emitted.ended == "deadline":
        raise Refusal(504, "the time for it is over", kind="server_error", code="deadline")
    if emitted.ended == "cancelled":
        raise unavailable("it was cancelled by the server; try again later", "cancelled")
    if emitted.message:
        raise _engine_error(emitted.message)
    raise internal()


def with_calls(finder: CallFinder | None, part: Part) -> Part:
    """A part whose text is told apart from calls of functions.

    Args:
        finder: Of the continuation; None: nothing can be called.
        part: The next one.
    """
    if finder is None:
        return part
    text, calls = finder.push(part.text)
    finish = part.finish
    if finish is not None:
        rest, more = finder.finish()
        text, calls = text + rest, calls + more
        finish = "tool_calls" if finder.any and finish == "stop" else finish
    return dataclasses.replace(part, text=text, calls=calls, finish=finish)


def _engine_error(message: str) -> Refusal:
    return Refusal(500, message, kind="server_error", code="engine_error")
