"""What the configurations of families with an encoder and a decoder have in common."""

import dataclasses

from colossax.errors import InputError
from colossax.nn.config.decoder import DecoderConfig
from colossax.nn.config.family import FamilyConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig(FamilyConfig):
    """A family's configuration of two stacks, checked when it is made."""

    def __post_init__(self):
        super().__post_init__()
        check_pair(self.encoder(), self.decoder())

    def encoder(self) -> DecoderConfig:
        """The encoder these sizes describe."""
        raise NotImplementedError

    def train_flops(self, source: int, written: int, *, frozen: bool = False) -> int:
        """FLOPs of a training step on a pair of texts of so many tokens; recomputation aside.

        Each stack's as of a model of its own, the head once, and cross-attention: maps of queries
        and outputs of each written token, of keys and values of each token of the source, and a
        score of each pair, three times 2 FLOPs for each number of a matrix, of a frozen one twice.
        """
        encoder, decoder = self.encoder(), self.decoder()
        each = 4 if frozen else 6
        head = each * encoder.vocab * encoder.logit_width
        read = source * (encoder.train_flops_per_token(source, frozen=frozen) - head)
        wrote = written * decoder.train_flops_per_token(written, frozen=frozen)
        of_head = decoder.layers * decoder.head_dim
        cross = 2 * decoder.embed * (written * decoder.heads + source * decoder.kv_heads)
        scores = 6 * 2 * source * written * decoder.heads
        return read + wrote + of_head * (each * cross + scores)


def check_pair(encoder: DecoderConfig, decoder: DecoderConfig) -> None:
    """Refuse an encoder and a decoder that are none, or do not fit together.

    Raises:
        InputError: That.
    """
    if encoder.causal or encoder.longest_source is not None:
        raise InputError(
            "model: the encoder's attention is causal, or it reads a source; give causal False"
            " and no longest_source"
        )
    if not decoder.causal or decoder.longest_source is None:
        raise InputError(
            "model: the decoder is not causal, or reads no source; give causal and longest_source"
        )
    if decoder.start is None:
        raise InputError(
            "model.start: the decoder has none, and what it writes begins with a token; give its"
            " number"
        )
    if decoder.frames is not None:
        raise InputError(
            "model.frames: the decoder reads frames of sound, and it is the encoder that does; give"
            " them there"
        )
    # An encoder of sound has no vocabulary.
    for name in ("embed",) if encoder.frames else ("vocab", "embed"):
        ours, other = getattr(encoder, name), getattr(decoder, name)
        if ours != other:
            raise InputError(
                f"model.{name}: {ours} in the encoder and {other} in the decoder, which share a"
                " table of tokens; give one number"
            )
    for name in ("mixture", "head", "transform", "token_width"):
        if any(getattr(one, name) is not None for one in (encoder, decoder)):
            raise InputError(f"model.{name}: encoder-decoders have none; leave it out")
