"""Qwen 3 (dense): Llama's parts with normed queries and keys."""

import dataclasses

from colossax.config import Count, Natural, NotNegative, Positive
from colossax.nn import DecoderConfig, FamilyConfig, LayerCount, RopeConfig, RopeScaling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3Config(FamilyConfig):
    """Sizes of a Qwen 3: as Llama, an RMSNorm over each head of q and k.

    `head_dim` is apart from `embed / heads`.

    Attributes:
        rope_theta: Base of the rotary embedding.
        rope_scaling: How it was stretched.
        window: Keys a query sees, itself included, after the first layers; None: all before it.
        full_first: So many first layers see all keys before them.

    Source: Yang et al. 2025, Qwen3.
    """

    vocab: Count
    embed: Count
    layers: LayerCount
    heads: Count
    kv_heads: Count
    mlp: Count
    head_dim: Count = 128
    max_seq: Count = 40_960
    norm_eps: NotNegative = 1e-6
    rope_theta: Positive = 1_000_000.0
    rope_scaling: RopeScaling | None = None
    window: Count | None = None
    full_first: Natural = 0
    tied: bool = True
    init_std: NotNegative = 0.02
    eos: Natural | None = None

    def decoder(self) -> DecoderConfig:
        """The decoder these sizes describe."""
        return self.described(
            rope=RopeConfig.scaled(self.rope_theta, self.rope_scaling),
            full_layers=tuple(range(min(self.full_first, self.layers))),
            qk_norm=True,
        )
