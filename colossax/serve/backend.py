"""What the server needs of an engine, wherever that runs."""

import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from colossax.data import Tokenizer
from colossax.scheduling import Emitted, EngineRequest


class EngineFull(Exception):  # noqa: N818 (a state, no fault)
    """The engine's own queue is full; the request may be made again later."""


class EngineDown(Exception):  # noqa: N818
    """The engine does not run; the request may be made again later."""


class EngineFailed(Exception):  # noqa: N818
    """The engine could not honour a request that it took; the sentence says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What does not change while an engine runs.

    Attributes:
        model: Name under which the base model is asked for.
        tokenizer: Of the model.
        vocab: Tokens that the model tells logits of; may be more than the tokenizer knows.
        slots: Most tokens of a prompt and its continuation together.
        ends: Token ids that end a continuation.
        seats: Requests that run at the same time.
        adapters: Names under which the model with an adapter is asked for.
        chat_template: Jinja source that makes a prompt of messages; None: the model has none.
        bos: Characters of the token that begins a document, for the template; may be empty.
        eos: Characters of the token that ends one.
        embeds: Whether it tells embeddings.
        speaks: Whether it continues texts.
        width: Numbers of an embedding.
        unit: Whether embeddings are of length 1.
        keeps: What requests may keep beside a window, one of `KEEPS`; None: they keep all.
    """

    model: str
    tokenizer: Tokenizer
    vocab: int
    slots: int
    ends: tuple[int, ...]
    seats: int
    adapters: tuple[str, ...] = ()
    chat_template: str | None = None
    bos: str = ""
    eos: str = ""
    embeds: bool = False
    speaks: bool = True
    width: int = 0
    unit: bool = False
    keeps: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """What `model` of a request may be."""
        return (self.model, *self.adapters)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
    """An engine at one moment.

    Attributes:
        seats_used: Requests that run.
        waiting: Requests that wait for a seat.
        pages_free: Pages of the cache that hold nothing.
        pages_used: Pages that a request refers to.
        pages_cached: Pages that hold a prefix nobody refers to.
        pages_host: Pages whose contents are in host memory.
        host_bytes: Those that they take there.
        pages_out: Pages that were copied there, since the start.
        pages_back: Pages that were copied from there, since the start.
        prefix_hit_tokens: Tokens of prompts that were found in the cache, since the start.
        preemptions: Requests that lost their pages to others, since the start.
        drafted: Tokens that were guessed and looked at, since the start.
        accepted: Those of them that were said.
        idle: Whether it has nothing to do.
        since_step_s: Seconds since its last step ended.
        replicas: Where several share its requests, of each the counts above by their names.
        failed: Why it runs no more, and will not again; empty: it does, or will.
    """

    seats_used: int = 0
    waiting: int = 0
    pages_free: int = 0
    pages_used: int = 0
    pages_cached: int = 0
    pages_host: int = 0
    host_bytes: int = 0
    pages_out: int = 0
    pages_back: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    drafted: int = 0
    accepted: int = 0
    idle: bool = True
    since_step_s: float = 0.0
    replicas: Sequence[Mapping[str, int]] = ()
    failed: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Started:
    """A request that an engine took.

    Attributes:
        number: Names it in `cancel`.
        said: Its tokens as they come; the last one has `ended`. One with neither says that it has
            a seat from now on; an engine need not say so. Holds what is not yet read, at most
            the request's `max_tokens`, so that a reader who is late holds up nobody.
    """

    number: int
    said: AsyncIterator[Emitted]


@runtime_checkable
class Backend(Protocol):
    """An engine as the server sees it; its methods are called in the server's event loop."""

    @property
    def facts(self) -> Facts:
        """What does not change."""
        ...

    async def start(self) -> None:
        """Called once, before any request, in the loop that all others are called in.

        Nobody is answered before it returns: what takes long goes on after it, `ready` being false.
        """
        ...

    async def close(self) -> None:
        """Called once, after the last request."""
        ...

    async def submit(self, request: EngineRequest) -> Started:
        """Take a request.

        Raises:
            InputError: It can never run here; the sentence says why.
            EngineFull: It cannot be queued now.
            EngineDown: The engine does not run.
        """
        ...

    def cancel(self, number: int) -> None:
        """End a request; does nothing if it has ended."""
        ...

    async def embed(self, prompts: Sequence[tuple[int, ...]]) -> list[list[float]]:
        """One vector for each prompt; only called where `facts.embeds`.

        Raises:
            InputError, EngineFull, EngineDown: As for `submit`.
            EngineFailed: It gave no numbers for one of them.
        """
        ...

    def stats(self) -> Stats:
        """How it is at this moment."""
        ...

    def ready(self) -> bool:
        """Whether its programs are compiled and it takes requests."""
        ...
