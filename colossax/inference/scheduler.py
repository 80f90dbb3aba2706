"""Which tokens go into the model next, by numbers of tokens alone: no JAX, no devices."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from colossax.config import Count, Temperature, check_types
from colossax.nn.config.frames import FRAMES_PER_TOKEN
from colossax.scheduling import Reads, check_length, check_tokens
from colossax.scheduling.reading import NOTHING
from colossax.scheduling.request import DrawSeed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and how to continue it.

    Attributes:
        prompt: Token ids, at least one.
        source: What an encoder reads first, as token ids; models of one stack read none.
        frames: Sound that it reads in place of those, `[frames, mels]`.
        images: What places among the prompt's tokens name, `[images, height, width, channels]`; see
            `nn.SeeingDecoder`.
        max_tokens: Most tokens to add.
        temperature: Logits are divided by it before sampling; 0 takes the likeliest token.
        seed: The token at position p is drawn with `fold_in(key(seed), p)`.
    """

    prompt: tuple[int, ...]
    source: tuple[int, ...] = ()
    frames: Any = dataclasses.field(default=None, compare=False)
    images: Any = dataclasses.field(default=None, compare=False)
    max_tokens: Count = 64
    temperature: Temperature = 0.0
    seed: DrawSeed = 0

    @property
    def read(self) -> int:
        """Tokens of its source."""
        return len(self.source) if self.frames is None else len(self.frames) // FRAMES_PER_TOKEN

    def check(self, *, vocab: int, slots: int, reads: Reads = NOTHING) -> None:
        """Refuse what no model of this vocabulary can continue in a sequence of `slots` tokens.

        Args:
            vocab: Tokens that there are.
            slots: Of the sequence.
            reads: What it reads beside a prompt.

        Raises:
            InputError: Naming what is wrong and what would do.
        """
        check_tokens(self.prompt, vocab + reads.places(self, slots=slots))
        check_types(self, "")
        check_length(len(self.prompt), self.max_tokens, slots)
        reads.check(self, vocab=vocab)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """Tokens of one sequence for one run of the decode program.

    Attributes:
        sequence: Whose they are; a scheduler's own number.
        request: What it continues.
        tokens: At most as many as the program is wide.
        start: Position of the first.
        emits: Whether the token that comes out continues the sequence; behind a part of a prompt
            it is what the model would have said, and is left where it is.
    """

    sequence: int
    request: Request
    tokens: tuple[int, ...]
    start: int
    emits: bool


@runtime_checkable
class Scheduler(Protocol):
    """Says what to run next, and is told what came of it."""

    def next(self) -> Call | None:
        """The next call; None when there is none.

        Then every sequence has ended, or waits for a token: on a mesh with stages calls are asked
        for while others are on their way.
        """
        ...

    def took(self, sequence: int, token: int) -> bool:
        """Note the token that a call which emits has given; whether it was the sequence's last."""
        ...


class Continuation:
    """One sequence on its way: first its prompt in chunks, then token after token."""

    def __init__(self, request: Request, *, sequence: int, width: int, eos: int | None = None):
        """Begin before the prompt.

        Args:
            request: What to continue.
            sequence: Its number.
            width: Most tokens of a call.
            eos: Token that ends it.
        """
        self._request, self._sequence = request, sequence
        self._width, self._eos = width, eos
        self._pending = request.prompt
        self._start = 0
        self._left = request.max_tokens

    @property
    def ready(self) -> bool:
        """Whether there is a call to make: not before the token of the last one is known."""
        return bool(self._pending)

    def next(self) -> Call:
        """The next call; only when `ready`."""
        tokens, self._pending = self._pending[: self._width], self._pending[self._width :]
        start = self._start
        self._start += len(tokens)
        return Call(
            sequence=self._sequence,
            request=self._request,
            tokens=tokens,
            start=start,
            emits=not self._pending,
        )

    def took(self, token: int) -> bool:
        """Go on with this token; whether it was the last."""
        self._left -= 1
        ended = token == self._eos or self._left == 0
        self._pending = () if ended else (token,)
        return ended


class InOrder:
    """Sequences to their ends in order, a few at once."""

    def __init__(
        self,
        requests: Sequence[Request],
        *,
        width: int,
        eos: int | None = None,
        at_once: int = 1,
    ):
        """Number the requests from 0.

        Args:
            requests: What to continue.
            width: Most tokens of a call.
            eos: Token that ends a sequence.
            at_once: Most sequences that have begun and not ended.
        """
        self._left = {
            i: Continuation(request, sequence=i, width=width, eos=eos)
            for i, request in enumerate(requests)
        }
        self._at_once = at_once

    def next(self) -> Call | None:
        """See `Scheduler`."""
        begun = itertools.islice(self._left.values(), self._at_once)
        ready = next((one for one in begun if one.ready), None)
        return None if ready is None else ready.next()

    def took(self, sequence: int, token: int) -> bool:
        """See `Scheduler`."""
        ended = self._left[sequence].took(token)
        if ended:
            del self._left[sequence]
        return ended
