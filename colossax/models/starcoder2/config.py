"""StarCoder2: grouped queries, rope and a window, between GPT-2's norms and MLP."""

import dataclasses

from colossax.config import Count, NotNegative, Positive
from colossax.nn import DecoderConfig, DecoderSizes, RopeConfig, RopeScaling, even_head_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class StarCoder2Config(DecoderSizes):
    """Sizes of a StarCoder2: LayerNorm, biases everywhere, a GELU MLP of two matrices, rope.

    Attributes:
        window: Keys a query sees, itself included; None: all before it.
        rope_theta: Base of the rotary embedding.
        rope_scaling: How it was stretched.
        bias: Biases of all maps but the head.

    Source: Lozhkov et al. 2024, StarCoder 2 and The Stack v2.
    """

    max_seq: Count = 16_384
    norm_eps: NotNegative = 1e-5
    rope_theta: Positive = 100_000.0
    rope_scaling: RopeScaling | None = None
    window: Count | None = 4096
    bias: bool = True
    tied: bool = True

    def decoder(self) -> DecoderConfig:
        """The decoder these sizes describe."""
        return self.described(
            head_dim=even_head_dim(self.embed, self.heads),
            norm="layer",
            activation="gelu_tanh",
            gated=False,
            rope=RopeConfig.scaled(self.rope_theta, self.rope_scaling),
            qkv_bias=self.bias,
            out_bias=self.bias,
            mlp_bias=self.bias,
        )
