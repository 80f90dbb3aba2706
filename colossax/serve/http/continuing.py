"""Completions and chats: from what was asked to the answer, whole or in pieces."""

import asyncio
import contextlib
import time
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from colossax.serve.backend import Backend, Started
from colossax.serve.http.answers import DONE, ChatForm, Form, Told, dumped, event
from colossax.serve.http.calling import finder_of
from colossax.serve.http.fields import Ask
from colossax.serve.http.generating import Part, parts, submitted, with_calls
from colossax.serve.http.limits import Doors
from colossax.serve.http.metrics import Metrics
from colossax.serve.http.preparing import Preparer, Wanted
from colossax.serve.http.streaming import EventStream, Outbox, while_there
from colossax.serve.options import Limits


class Continuer:
    """Answers what was asked by continuations of an engine."""

    def __init__(
        self, backend: Backend, preparer: Preparer, doors: Doors, metrics: Metrics, limits: Limits
    ) -> None:
        self._backend, self._preparer, self._doors = backend, preparer, doors
        self._metrics, self._limits = metrics, limits

    async def answer(self, request: Request, ask: Ask) -> Response:
        """The answer to a completion or a chat.

        Raises:
            Refusal: It cannot be answered.
        """
        since = time.monotonic()
        wanted = await self._preparer.wanted(ask)
        self._doors.enter(len(wanted))
        try:
            started = await submitted(self._backend, wanted)
        except BaseException:
            self._doors.leave(len(wanted))
            raise
        run = _Run(self._backend, self._metrics, self._doors, ask, wanted, started, since)
        if ask.stream:
            return EventStream(
                run.stream,
                limits=self._limits,
                doors=self._doors,
                dropped=lambda why: self._metrics.dropped.labels(why).inc(),
                finish=run.finish,
            )
        try:
            told = await while_there(run.whole(), request.receive, self._doors)
        finally:
            run.finish()
        return Response(told, media_type="application/json")


class _Run:
    """The continuations of one request."""

    def __init__(
        self,
        backend: Backend,
        metrics: Metrics,
        doors: Doors,
        ask: Ask,
        wanted: Sequence[Wanted],
        started: Sequence[Started],
        since: float,
    ) -> None:
        self._backend, self._metrics, self._doors = backend, metrics, doors
        self._ask, self._wanted, self._started = ask, wanted, started
        self._since = since
        self._told = [Told() for _ in wanted]
        template = backend.facts.chat_template or ""
        self._finders = [finder_of(ask.tools, template) for _ in wanted]
        form = ChatForm if ask.messages else Form
        self._form = form(ask.model, backend.facts.tokenizer, ask.sampling.logprobs, ask.keep)
        # Each prompt once, however often it is continued.
        self._prompt_tokens = sum(len(one.request.prompt) for one in wanted[:: ask.n])
        metrics.prompt_tokens.inc(self._prompt_tokens)

    async def whole(self) -> bytes:
        """The answer at once."""
        await self._all(None)
        return dumped(self._form.whole(self._told, self._prompt_tokens))

    async def stream(self, outbox: Outbox) -> None:
        """Put the answer's pieces into a box."""
        usage = self._ask.usage
        for opening in self._form.opening(len(self._wanted), with_usage=usage):
            outbox.put(event(opening))
        await self._all(outbox)
        if usage:
            tokens = sum(one.tokens for one in self._told)
            outbox.put(event(self._form.last(self._prompt_tokens, tokens)))
        outbox.put(DONE)

    def finish(self) -> None:
        """Nobody wants more of it."""
        for one in self._started:
            self._backend.cancel(one.number)
        self._doors.leave(len(self._wanted))
        tokens = sum(one.tokens for one in self._told)
        self._metrics.tokens.inc(tokens)
        self._metrics.of_model.labels(self._ask.model).inc(tokens)

    async def _all(self, outbox: Outbox | None) -> None:
        """Follow all continuations to their ends; the first that fails ends the others."""
        tasks = [
            asyncio.create_task(self._follow(one, started, outbox))
            for one, started in zip(self._wanted, self._started, strict=True)
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, wanted: Wanted, started: Started, outbox: Outbox | None) -> None:
        said = parts(
            self._backend,
            started,
            self._backend.facts.tokenizer,
            self._ask.stop,
            echo=wanted.echo,
            clock=self._metrics.clock(self._since, len(wanted.request.prompt)),
        )
        async with contextlib.aclosing(said):
            async for part in said:
                self._take(wanted.index, part, outbox)

    def _take(self, index: int, part: Part, outbox: Outbox | None) -> None:
        part = with_calls(self._finders[index], part)
        self._told[index].add(part)
        if outbox is not None and (part.text or part.entries or part.calls or part.finish):
            piece = self._form.chunk(index, part, with_usage=self._ask.usage)
            outbox.put(event(piece), counted=part.tokens > 0)
