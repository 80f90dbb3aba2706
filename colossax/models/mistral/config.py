"""Mistral: Llama's parts with a sliding window."""

import dataclasses

from colossax.config import Count, Natural, NotNegative, Positive
from colossax.nn import (
    DecoderConfig,
    FamilyConfig,
    LayerCount,
    RopeConfig,
    RopeScaling,
    even_head_dim,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MistralConfig(FamilyConfig):
    """Sizes of a Mistral: as Llama, each query seeing the last `window` keys.

    `head_dim` None is `embed / heads`. `window` counts the query's own key; None sees all.

    Attributes:
        rope_theta: Base of the rotary embedding.
        rope_scaling: How it was stretched.

    Source: Jiang et al. 2023.
    """

    vocab: Count
    embed: Count
    layers: LayerCount
    heads: Count
    kv_heads: Count
    mlp: Count
    head_dim: Count | None = None
    max_seq: Count = 32_768
    norm_eps: NotNegative = 1e-5
    rope_theta: Positive = 10_000.0
    rope_scaling: RopeScaling | None = None
    window: Count | None = 4096
    tied: bool = False
    init_std: NotNegative = 0.02
    eos: Natural | None = None

    def decoder(self) -> DecoderConfig:
        """The decoder these sizes describe."""
        return self.described(
            head_dim=self.head_dim or even_head_dim(self.embed, self.heads),
            rope=RopeConfig.scaled(self.rope_theta, self.rope_scaling),
        )
