"""SmolLM3: Llama's parts, some layers without a rotary embedding."""

import dataclasses

from colossax.config import Count, Natural, NotNegative, Positive
from colossax.nn import DecoderConfig, DecoderSizes, RopeConfig, RopeScaling, even_head_dim, every


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmolLM3Config(DecoderSizes):
    """Sizes of a SmolLM3: as Llama; each `nope_every`-th layer has no rotary embedding (0: none).

    Attributes:
        rope_theta: Base of the rotary embedding.
        rope_scaling: How it was stretched.
        attention_bias: Biases in attention.

    Source: Hugging Face 2025, SmolLM3; Yang et al. 2025, Rope to Nope and Back Again.
    """

    max_seq: Count = 65_536
    norm_eps: NotNegative = 1e-6
    rope_theta: Positive = 2_000_000.0
    rope_scaling: RopeScaling | None = None
    nope_every: Natural = 4
    attention_bias: bool = False
    mlp_bias: bool = False
    tied: bool = True

    def decoder(self) -> DecoderConfig:
        """The decoder these sizes describe."""
        return self.described(
            head_dim=even_head_dim(self.embed, self.heads),
            rope=RopeConfig.scaled(self.rope_theta, self.rope_scaling),
            full_layers=every(self.nope_every, self.layers),
            full_rope=False,
            qkv_bias=self.attention_bias,
            out_bias=self.attention_bias,
        )
