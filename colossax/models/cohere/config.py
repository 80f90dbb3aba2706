"""Command R: attention and MLP side by side after one norm without a bias."""

import dataclasses

from colossax.config import Count, NotNegative, Positive
from colossax.nn import DecoderConfig, DecoderSizes, RopeConfig, RopeScaling, even_head_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class CohereConfig(DecoderSizes):
    """Sizes of a Command R: no biases, neighbours turn, logits times a number.

    Attributes:
        logit_scale: That number.
        rope_theta: Base of the rotary embedding.
        rope_scaling: How it was stretched.
        attention_bias: Biases in attention.
        qk_norm: Queries and keys are normed, as in Command R+.

    Source: Cohere 2024, Command R.
    """

    max_seq: Count = 8192
    norm_eps: NotNegative = 1e-5
    logit_scale: Positive = 0.0625
    rope_theta: Positive = 10_000.0
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    qk_norm: bool = False
    tied: bool = True

    def decoder(self) -> DecoderConfig:
        """The decoder these sizes describe."""
        return self.described(
            head_dim=even_head_dim(self.embed, self.heads),
            norm="layer",
            norm_bias=False,
            parallel=True,
            shared_norm=True,
            qk_norm=False,
            qk_norm_layer=self.qk_norm,
            rope=RopeConfig.scaled(self.rope_theta, self.rope_scaling, interleaved=True),
            qkv_bias=self.attention_bias,
            out_bias=self.attention_bias,
        )
