"""ModernBERT: an encoder with rope, most of whose layers see a window."""

import dataclasses

from colossax.config import Count, Natural, NotNegative, Positive
from colossax.nn import (
    DecoderConfig,
    FamilyConfig,
    LayerCount,
    RopeConfig,
    TransformConfig,
    even_head_dim,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModernBERTConfig(FamilyConfig):
    """Sizes of a ModernBERT: gated GELU MLP, norms of inputs and of embeddings, tied head.

    Attributes:
        window: Half of it is seen on each side of a token, in layers that do not see all.
        full_every: The first layer and each so many-th behind it see all tokens.
        rope_theta: Base of the rotary embedding of those layers.
        local_theta: Of the others.
        head_activation: Of the map before the head.
        head_transform_bias: Whether that map has a bias.
        head_bias: A number is added to each token's logit.

    Source: Warner et al. 2024.
    """

    vocab: Count
    embed: Count
    layers: LayerCount
    heads: Count
    mlp: Count
    max_seq: Count = 8192
    norm_eps: NotNegative = 1e-5
    norm_bias: bool = False
    activation: str = "gelu"
    attention_bias: bool = False
    mlp_bias: bool = False
    window: Count = 128
    full_every: Count = 3
    rope_theta: Positive = 160_000.0
    local_theta: Positive = 10_000.0
    head_activation: str = "gelu"
    head_transform_bias: bool = False
    head_bias: bool = True
    tied: bool = True
    init_std: NotNegative = 0.02
    eos: Natural | None = None

    @property
    def transformed(self) -> TransformConfig:
        """What stands before each head of the family."""
        return TransformConfig(activation=self.head_activation, bias=self.head_transform_bias)

    def decoder(self) -> DecoderConfig:
        """The encoder these sizes describe."""
        return self.described(
            causal=False,
            kv_heads=self.heads,
            head_dim=even_head_dim(self.embed, self.heads),
            norm="layer",
            first_norm=False,
            qkv_bias=self.attention_bias,
            out_bias=self.attention_bias,
            embed_norm=True,
            full_layers=tuple(range(0, self.layers, self.full_every)),
            rope=RopeConfig(theta=self.rope_theta),
            local_rope=RopeConfig(theta=self.local_theta),
            transform=self.transformed if self.head is None else None,
        )
