"""Qwen 2 and 2.5: Llama's parts with biases on q, k and v."""

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
class Qwen2Config(FamilyConfig):
    """Sizes of a Qwen 2: as Llama, q, k and v with biases. `head_dim` None is `embed / heads`.

    Attributes:
        rope_theta: Base of the rotary embedding.
        rope_scaling: How it was stretched.
        window: Keys a query sees, itself included, after the first layers; None: all before it.
        full_first: So many first layers see all keys before them.

    Source: Yang et al. 2024, Qwen2 technical report.
    """

    vocab: Count
    embed: Count
    layers: LayerCount
    heads: Count
    kv_heads: Count
    mlp: Count
    head_dim: Count | None = None
    max_seq: Count = 32_768
    norm_eps: NotNegative = 1e-6
    rope_theta: Positive = 1_000_000.0
    rope_scaling: RopeScaling | None = None
    window: Count | None = None
    full_first: Natural = 0
    tied: bool = False
    init_std: NotNegative = 0.02
    eos: Natural | None = None

    def decoder(self) -> DecoderConfig:
        """The decoder these sizes describe."""
        return self.described(
            head_dim=self.head_dim or even_head_dim(self.embed, self.heads),
            rope=RopeConfig.scaled(self.rope_theta, self.rope_scaling),
            full_layers=tuple(range(min(self.full_first, self.layers))),
            qkv_bias=True,
        )
