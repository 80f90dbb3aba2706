"""Which tokens go into the model next, by numbers of tokens alone: no JAX, no devices."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from colossax.config import Count, Temperature, check_types
from colossax.errors import InputError
from colossax.nn.config.frames import FRAMES_PER_TOKEN
from colossax.scheduling.request import DrawSeed, check_length, check_tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """The images that a model reads among its tokens.

    Attributes:
        shape: Height, width and channels.
        places: Tokens that one takes; None where images are of any size.
        square: Height and width of what becomes a token.
    """

    shape: tuple[int, int, int]
    places: int | None
    square: tuple[int, int]

    def places_of(self, height: int, width: int) -> int:
        """Tokens of an image of this size; 0 where the model reads none of it."""
        if self.places is not None:
            return self.places if (height, width) == self.shape[:2] else 0
        (rows, above), (columns, beside) = (
            divmod(side, each) for side, each in zip((height, width), self.square, strict=True)
        )
        return 0 if above or beside else rows * columns


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

    def check(
        self,
        *,
        vocab: int,
        slots: int,
        longest_source: int | None = None,
        mels: int | None = None,
        sight: Seen | None = None,
    ) -> None:
        """Refuse what no model of this vocabulary can continue in a sequence of `slots` tokens.

        Args:
            vocab: Tokens that there are.
            slots: Of the sequence.
            longest_source: Tokens that its encoder reads; None: it has none.
            mels: Numbers of a frame, where it reads sound; None: it does not.
            sight: The images that it reads among its tokens; None: it reads none.

        Raises:
            InputError: Naming what is wrong and what would do.
        """
        check_tokens(self.prompt, vocab + check_images(self.images, sight))
        check_types(self, "")
        check_length(len(self.prompt), self.max_tokens, slots)
        if mels is None or longest_source is None:
            check_source(self.source, vocab, longest_source)
        if mels is not None or self.frames is not None:
            check_frames(self, longest_source, mels)


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


def check_source(source: Sequence[int], vocab: int, longest: int | None) -> None:
    """Refuse a source where none is read, none where one is, and what an encoder cannot read.

    Raises:
        InputError: That.
    """
    if longest is None:
        if source:
            raise InputError(
                "source: the model has no encoder that reads one; give a prompt alone, or an"
                " encoder-decoder"
            )
        return
    if not source:
        raise InputError("source: it is empty, and the model's encoder reads one; give it")
    if len(source) > longest:
        raise InputError(
            f"source: it has {len(source)} tokens, above the {longest} of the model; shorten it"
        )
    check_tokens(source, vocab, name="source")


def check_frames(request: Request, longest: int | None, mels: int | None) -> None:
    """Refuse sound where none is read, none where it is, and what an encoder cannot read.

    Args:
        request: What is asked.
        longest: Most tokens of a source, each of two frames.
        mels: Numbers of a frame; None: the model reads no sound.

    Raises:
        InputError: That.
    """
    if mels is None or longest is None:
        raise InputError("frames: the model has no encoder that reads sound; leave them out")
    if request.source:
        raise InputError("source: the model's encoder reads sound, not tokens; give frames")
    most, shape = FRAMES_PER_TOKEN * longest, getattr(request.frames, "shape", None)
    if shape is None:
        raise InputError(f"frames: the model's encoder reads sound; give it, [frames, {mels}]")
    if len(shape) != 2 or shape[1] != mels or not 0 < shape[0] <= most or shape[0] % 2:
        raise InputError(
            f"frames: found shape {list(shape)}, and the model reads an even number of them, {most}"
            f" or fewer, of {mels} numbers; give [frames, {mels}]"
        )


def check_images(images: Any, sight: Seen | None) -> int:
    """How many places the images give; refuse those where none are read, or of another size.

    Raises:
        InputError: That.
    """
    if images is None:
        return 0
    if sight is None:
        raise InputError("images: the model reads none among its tokens; leave them out")
    height, width, channels = sight.shape
    shape: Any = getattr(images, "shape", ())
    places = sight.places_of(*shape[1:3]) if len(shape) == 4 else 0
    if not places or shape[3] != channels:
        if sight.places is None:
            raise InputError(
                f"images: found shape {list(shape)}, and sides of the model's are multiples of"
                f" {sight.square[0]} and {sight.square[1]}, with {channels} channels; give"
                f" [images, height, width, {channels}]"
            )
        raise InputError(
            f"images: found shape {list(shape)}, and the model's are {height} high and {width} wide"
            f" with {channels} channels; give [images, {height}, {width}, {channels}]"
        )
    return shape[0] * places
