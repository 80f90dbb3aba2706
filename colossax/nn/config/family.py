"""What the configurations of model families have in common."""

import dataclasses
from typing import Any

from colossax.config import Count, Natural, NotNegative, check_types
from colossax.errors import InputError
from colossax.nn.config.decoder import DecoderConfig, LayerCount
from colossax.nn.config.dropout import DropoutConfig
from colossax.nn.config.head import HeadConfig, TransformConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class FamilyConfig:
    """A family's configuration, checked when it is made: its fields, and the decoder they make.

    Attributes:
        head: What the model tells in place of logits of its vocabulary; None: those.
        pad: Token that fills rows up, where known; here segments say so, and files name it.
        dropout: Shares of values that are dropped in training; files do not say it.
    """

    head: HeadConfig | None = None
    pad: Natural | None = None
    dropout: DropoutConfig = DropoutConfig()

    def __post_init__(self):
        check_types(self, "model")
        self.decoder()

    def decoder(self) -> DecoderConfig:
        """The decoder these sizes describe."""
        raise NotImplementedError

    def described(self, **parts: Any) -> DecoderConfig:
        """A decoder of the fields that both have, and of these parts."""
        names = {field.name for field in dataclasses.fields(DecoderConfig)} - parts.keys()
        shared = {name: getattr(self, name) for name in names if hasattr(self, name)}
        return DecoderConfig(**shared, **parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderSizes(FamilyConfig):
    """Sizes that nearly all decoders have; see `DecoderConfig`."""

    vocab: Count
    embed: Count
    layers: LayerCount
    heads: Count
    kv_heads: Count
    mlp: Count
    init_std: NotNegative = 0.02
    eos: Natural | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderSizes(FamilyConfig):
    """Sizes that encoders have: LayerNorm, also of embeddings, and a transform before the head."""

    vocab: Count
    embed: Count
    layers: LayerCount
    heads: Count
    mlp: Count
    activation: str = "gelu"
    tied: bool = True
    init_std: NotNegative = 0.02
    eos: Natural | None = None

    @property
    def transformed(self) -> TransformConfig:
        """What stands before logits of the vocabulary."""
        return TransformConfig(activation=self.activation)

    def described(self, **parts: Any) -> DecoderConfig:
        """An encoder of the fields that both have, and of these parts."""
        return super().described(
            causal=False,
            kv_heads=self.heads,
            head_dim=even_head_dim(self.embed, self.heads),
            norm="layer",
            embed_norm=True,
            transform=self.transformed if self.head is None else None,
            **parts,
        )


def every(count: int, layers: int) -> tuple[int, ...]:
    """Numbers of each so many-th of the layers; none for 0."""
    return tuple(at for at in range(layers) if count and (at + 1) % count == 0)


def even_head_dim(embed: int, heads: int) -> int:
    """`embed / heads`.

    Raises:
        InputError: The heads do not divide it.
    """
    if embed % heads:
        raise InputError(
            f"model: {heads} heads do not divide embed {embed};"
            f" choose heads that do, or give head_dim where the family has it"
        )
    return embed // heads
