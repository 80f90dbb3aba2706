"""What a model reads beside a prompt: a source, sound or images."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from colossax.errors import InputError
from colossax.scheduling.checks import check_tokens


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
class Heard:
    """The sound that a model's encoder reads in place of tokens.

    Attributes:
        mels: Numbers of a frame.
        frames: Of which a token is made.
    """

    mels: int
    frames: int


@runtime_checkable
class Asked(Protocol):
    """Of a request, what is read before its first token."""

    @property
    def source(self) -> tuple[int, ...]:
        """Token ids."""
        ...

    @property
    def frames(self) -> Any:
        """Sound in their place, `[frames, mels]`, or None."""
        ...

    @property
    def images(self) -> Any:
        """`[images, height, width, channels]`, or None."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reads:
    """What a model reads beside a prompt; as it stands, nothing.

    Attributes:
        longest: Most tokens of a source; None: there is no encoder that reads one.
        heard: What that encoder reads in place of tokens; None: it reads tokens.
        sight: Images among the prompt's tokens; None: it reads none.
    """

    longest: int | None = None
    heard: Heard | None = None
    sight: Seen | None = None

    @property
    def anything(self) -> bool:
        """Whether there is anything to read."""
        return self.longest is not None or self.sight is not None

    def count(self, asked: Asked) -> int:
        """Tokens of the source of a request that was checked."""
        if asked.frames is None or self.heard is None:
            return len(asked.source)
        return len(asked.frames) // self.heard.frames

    def check(self, asked: Asked, *, vocab: int) -> None:
        """Refuse a source or sound that the encoder cannot read, or that nothing reads.

        Raises:
            InputError: Naming what is wrong and what would do.
        """
        if self.heard is None:
            check_source(asked.source, vocab, self.longest)
        if self.heard is not None or asked.frames is not None:
            check_frames(asked, self.longest, self.heard)

    def places(self, asked: Asked, *, slots: int) -> int:
        """How many places the images of a request give.

        Args:
            asked: See there.
            slots: Of a sequence, which keeps what it has seen.

        Raises:
            InputError: The model reads none, or none of this size or number.
        """
        return check_images(asked.images, self.sight, slots)


NOTHING = Reads()
"""Of models that a prompt is all for."""


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


def check_frames(asked: Asked, longest: int | None, heard: Heard | None) -> None:
    """Refuse sound where none is read, none where it is, and what an encoder cannot read.

    Args:
        asked: See there.
        longest: Most tokens of a source.
        heard: None: the model reads no sound.

    Raises:
        InputError: That.
    """
    if heard is None or longest is None:
        raise InputError("frames: the model has no encoder that reads sound; leave them out")
    if asked.source:
        raise InputError("source: the model's encoder reads sound, not tokens; give frames")
    most, mels, shape = heard.frames * longest, heard.mels, getattr(asked.frames, "shape", None)
    if shape is None:
        raise InputError(f"frames: the model's encoder reads sound; give it, [frames, {mels}]")
    if len(shape) != 2 or shape[1] != mels or not 0 < shape[0] <= most or shape[0] % heard.frames:
        raise InputError(
            f"frames: found shape {list(shape)}, and the model reads an even number of them, {most}"
            f" or fewer, of {mels} numbers; give [frames, {mels}]"
        )


def check_images(images: Any, sight: Seen | None, slots: int) -> int:
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
    if shape[0] * places > slots:
        raise InputError(
            f"images: {shape[0]} of them take {shape[0] * places} tokens, above the {slots} of a"
            " sequence; give fewer, or more slots"
        )
    return shape[0] * places
