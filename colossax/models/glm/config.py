"""GLM-4-9B: Llama's parts, half of a head turned."""

import dataclasses

from colossax.config import Count, NotNegative, Positive
from colossax.nn import DecoderConfig, DecoderSizes, RopeConfig, RopeScaling


@dataclasses.dataclass(frozen=True, kw_only=True)
class GLMConfig(DecoderSizes):
    """Sizes of a GLM: as Llama, biases of queries, keys and values, neighbours turn.

    Attributes:
        rope_theta: Base of the rotary embedding.
        rope_scaling: How it was stretched.
        rope_dims: Of a head, how many dims turn; None: all.
        attention_bias: Biases of queries, keys and values.

    Source: Team GLM 2024, ChatGLM.
    """

    head_dim: Count = 128
    max_seq: Count = 131_072
    norm_eps: NotNegative = 1.5625e-7
    rope_theta: Positive = 10_000.0
    rope_scaling: RopeScaling | None = None
    rope_dims: Count | None = 64
    attention_bias: bool = True
    tied: bool = False

    def decoder(self) -> DecoderConfig:
        """The decoder these sizes describe."""
        dims = self.rope_dims
        return self.described(
            rope=RopeConfig.scaled(self.rope_theta, self.rope_scaling, dims=dims, interleaved=True),
            qkv_bias=self.attention_bias,
        )
