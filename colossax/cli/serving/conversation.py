"""A conversation: messages, and an engine that computes of each prompt what it has not seen."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from colossax.data import ChatTemplate, Tokenizer
from colossax.errors import InputError
from colossax.scheduling import Emitted, EngineRequest, Keep, SamplingConfig
from colossax.serve import Telling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manner:
    """How answers are made.

    Attributes:
        ends: Token ids that end one.
        sampling: How tokens are chosen.
        max_tokens: Most tokens of one; None: what there is room for.
        adapter: Name of the adapter that computes it.
        keep: What is kept of the sequence; None: all.
    """

    ends: tuple[int, ...]
    sampling: SamplingConfig = SamplingConfig()
    max_tokens: int | None = None
    adapter: str | None = None
    keep: Keep | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """An answer.

    Attributes:
        text: What was said.
        tokens: Of it, what ended it among them.
        prompt: Tokens of all messages before it.
        reused: How many of those were not computed again.
        ended: Why: `stop`, `length` or `cancelled`.
    """

    text: str
    tokens: tuple[int, ...]
    prompt: tuple[int, ...]
    reused: int
    ended: str


class Conversation:
    """Messages that a model answers one after another.

    Prompts are made of all messages by the chat template, as a server makes them; pages of the
    engine that hold what they begin with are found there.

    Args:
        engine: That nobody else asks.
        tokenizer: Of the model.
        template: Of its chats.
        slots: Most tokens of all messages together.
        manner: How answers are made.
        system: What the conversation begins with.
    """

    def __init__(
        self,
        engine: Any,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        slots: int,
        manner: Manner,
        system: str | None = None,
    ) -> None:
        self._engine, self._tokenizer, self._template = engine, tokenizer, template
        self._slots, self._manner = slots, manner
        self._system = opening(system)
        self._messages = list(self._system)

    def reset(self) -> None:
        """Begin anew, with the system prompt."""
        self._messages = list(self._system)

    @property
    def slots(self) -> int:
        """Most tokens of all messages together."""
        return self._slots

    def answer(
        self,
        text: str,
        say: Callable[[str], None] = lambda _piece: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Turn:
        """What the model answers; then both are part of the conversation.

        Args:
            text: What is said to it.
            say: Is given the answer's text, piece by piece.
            stopped: Whether the answer is to end where it is, asked before each step.

        Raises:
            InputError: The template refuses it, there is no room for an answer, or the model gave
                no numbers; then the conversation is as it was.
        """
        asked = [*self._messages, {"role": "user", "content": text}]
        request = self._request(self._template.tokens(asked))
        before, telling = self._engine.stats.scheduler.reused, Telling(self._tokenizer, ())
        pieces, tokens, last = [], [], None

        def told(piece: str) -> None:
            pieces.append(piece)
            say(piece)

        for last in self._emitted(request, stopped):
            if last.token is not None:
                tokens.append(last.token)
                if last.ended != "stop":
                    told(telling.push(last.token)[0])
        assert last is not None and last.ended is not None
        if last.ended not in ("stop", "length", "cancelled"):
            raise InputError(f"{last.message}; look at the checkpoint's parameters")
        told(telling.finish()[0])
        said = "".join(pieces)
        self._messages = [*asked, {"role": "assistant", "content": said}]
        return Turn(
            text=said,
            tokens=tuple(tokens),
            prompt=request.prompt,
            reused=self._engine.stats.scheduler.reused - before,
            ended=last.ended,
        )

    def _request(self, prompt: list[int]) -> EngineRequest:
        room, manner = self._slots - len(prompt), self._manner
        if room < 1:
            raise InputError(
                f"the conversation has {len(prompt)} tokens with this, and {self._slots - 1} leave"
                " room for an answer; say less, or begin anew with /reset"
            )
        return EngineRequest(
            prompt=tuple(prompt),
            max_tokens=room if manner.max_tokens is None else min(room, manner.max_tokens),
            ends=manner.ends,
            sampling=manner.sampling,
            adapter=manner.adapter,
            keep=manner.keep,
        )

    def _emitted(self, request: EngineRequest, stopped: Callable[[], bool]) -> Iterator[Emitted]:
        """What the engine says to its end."""
        number = self._engine.add(request)
        while self._engine.busy:
            if stopped():
                self._engine.cancel(number)
            yield from self._engine.step()


def opening(system: str | None) -> tuple[dict[str, str], ...]:
    """Messages that stand before all others."""
    return () if system is None else ({"role": "system", "content": system},)
