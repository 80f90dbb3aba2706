"""Llama 2, 3, 3.1 and 3.2."""

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
class LlamaConfig(FamilyConfig):
    """Sizes of a Llama: RMSNorm, rope, gated SiLU MLP, grouped queries.

    `head_dim` None is `embed / heads`.

    Attributes:
        rope_theta: Base of the rotary embedding.
        rope_scaling: How it was stretched; Llama 3.1 and later are by `Llama3Scaling`.
        attention_bias: Biases in attention.

    Source: Touvron et al. 2023; Dubey et al. 2024.
    """

    vocab: Count
    embed: Count
    layers: LayerCount
    heads: Count
    kv_heads: Count
    mlp: Count
    head_dim: Count | None = None
    max_seq: Count = 4096
    norm_eps: NotNegative = 1e-5
    rope_theta: Positive = 10_000.0
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tied: bool = False
    init_std: NotNegative = 0.02
    eos: Natural | None = None

    def decoder(self) -> DecoderConfig:
        """The decoder these sizes describe."""
        return self.described(
            head_dim=self.head_dim or even_head_dim(self.embed, self.heads),
            rope=RopeConfig.scaled(self.rope_theta, self.rope_scaling),
            qkv_bias=self.attention_bias,
            out_bias=self.attention_bias,
        )
