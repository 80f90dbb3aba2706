"""Which tokens of a row a model is to tell, as data."""

import dataclasses
from typing import TYPE_CHECKING, Annotated

from colossax.config import Bound, Positive, Share, check_types
from colossax.errors import InputError
from colossax.tasks.sound.sets import reads_sound

if TYPE_CHECKING:
    from colossax.tasks.config import TrainConfig

_PART = Bound(low=0, above=True, high=1, below=True, told="a share above 0, below 1, as 0.15")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskConfig:
    """Which tokens of a row are masked, for an encoder to tell; see `data.MaskedRows`.

    Attributes:
        rate: Share of the tokens: 0.15 in BERT, 0.3 in ModernBERT.
        random: Share of those that become any token, not the mask.
        kept: Share of those that stay as they are.
    """

    rate: Annotated[float, _PART] = 0.15
    random: Share = 0.1
    kept: Share = 0.1

    def __post_init__(self):
        check_types(self, "data.masking")
        if self.random + self.kept > 1:
            raise InputError(
                f"data.masking: random {self.random:g} and kept {self.kept:g} are shares of the"
                " tokens that are to be told, and more than all; give shares whose sum is at most 1"
            )

    def __str__(self) -> str:
        """For people, and of which run it is: `0.15, 0.1 any, 0.1 kept`."""
        return f"{self.rate:g}, {self.random:g} any, {self.kept:g} kept"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpanConfig:
    """Spans of a row that are left out of what is read, and written; see `data.SpanRows`.

    Attributes:
        rate: Share of the tokens.
        length: Of a span, on average.
    """

    rate: Annotated[float, _PART] = 0.15
    length: Positive = 3.0

    def __post_init__(self):
        check_types(self, "data.spans")

    def __str__(self) -> str:
        """For people, and of which run it is: `0.15, 3`."""
        return f"{self.rate:g}, {self.length:g}"

    def counts(self, seq_len: int) -> tuple[int, int]:
        """How many tokens of a row are left out, and in how many spans.

        Raises:
            InputError: So many spans have no token between them, or none of their own.
        """
        told = round(seq_len * self.rate)
        spans = max(1, round(told / self.length))
        if not spans <= told <= seq_len - spans:
            raise InputError(
                f"data.spans: {told} of the {seq_len} tokens of a row, in {spans} spans, leave no"
                " token between them or in them; give another rate or length, or longer rows"
            )
        return told, spans

    def lengths(self, seq_len: int) -> tuple[int, int]:
        """Tokens that are read of a row, and that are written."""
        told, spans = self.counts(seq_len)
        return seq_len - told + spans + 1, told + spans + 1


def check_spans(config: "TrainConfig") -> None:
    """Refuse spans where no encoder reads the rest, and an encoder that has nothing to read.

    Raises:
        InputError: That, or rows that are too long.
    """
    data, decoder = config.data, config.model.decoder()
    spans, longest_source = data.spans, getattr(decoder, "longest_source", None)
    if (spans is None) != (longest_source is None):
        found = "reads no source" if spans else "is an encoder-decoder, and reads one"
        raise InputError(
            f"data.spans: the model {found}; start from a recipe of an encoder-decoder with"
            " spans, as t5_stdlib, or of neither"
        )
    if spans is None or longest_source is None:
        return
    if data.masking is not None or data.packing != "packed" or config.sample.prompt:
        raise InputError(
            "data.spans: they are of rows that are filled up with text, and nothing is masked"
            " or continued beside them; leave data.masking, data.packing and sample.prompt out"
        )
    source, written = spans.lengths(data.seq_len)
    if source > longest_source or written > decoder.max_seq:
        raise InputError(
            f"data.seq_len: of {data.seq_len} tokens {source} are read and {written}"
            f" written, and the model has {longest_source} and {decoder.max_seq}; shorten the"
            " rows or raise model.max_seq"
        )


def check_told(config: "TrainConfig") -> None:
    """Refuse a model that cannot tell what the data ask of it.

    Raises:
        InputError: That.
    """
    decoder, masked = config.model.decoder(), config.data.masking is not None
    causal = getattr(decoder, "causal", True)
    if getattr(decoder, "patches", None) or hasattr(config.model, "image_encoder"):
        raise InputError(
            "data.images: the model reads images, and the run is on text; give data.images, as"
            " the recipe vit_digits does"
        )
    if reads_sound(config.model):
        raise InputError(
            "data.audio: the model's encoder reads sound, and the run is on text; give"
            " data.audio, as the recipe whisper_tones does"
        )
    check_spans(config)
    if getattr(decoder, "head", None) is not None and config.objective.name != "reward":
        raise InputError(
            "model.head: a run on text trains logits of the vocabulary, and the model has"
            " another head; leave it out, or give boost the loss of such a head"
        )
    if causal and masked:
        raise InputError(
            "data.masking: the model's attention is causal, so a masked token would be told by"
            " those before it alone; leave masking out, or take an encoder, as bert_stdlib has"
        )
    if not causal and not masked:
        raise InputError(
            "data.masking: the model sees the next token, which it would be asked for; start"
            " from a recipe that masks tokens, as bert_stdlib"
        )
    if not causal and config.sample.prompt:
        raise InputError(
            "sample.prompt: the model's attention is not causal, so it continues no text; leave"
            " the prompt empty"
        )
