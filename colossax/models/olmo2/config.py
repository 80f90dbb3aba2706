"""OLMo 2: norms of what sublayers give, queries and keys normed over all heads."""

import dataclasses

from colossax.config import Count, NotNegative, Positive
from colossax.nn import DecoderConfig, DecoderSizes, RopeConfig, RopeScaling, even_head_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class OLMo2Config(DecoderSizes):
    """Sizes of an OLMo 2: as Llama, sublayers' outputs normed in place of their inputs.

    Attributes:
        rope_theta: Base of the rotary embedding.
        rope_scaling: How it was stretched.

    Source: OLMo Team 2024, 2 OLMo 2 Furious.
    """

    max_seq: Count = 4096
    norm_eps: NotNegative = 1e-6
    rope_theta: Positive = 500_000.0
    rope_scaling: RopeScaling | None = None
    tied: bool = False

    def decoder(self) -> DecoderConfig:
        """The decoder these sizes describe."""
        return self.described(
            head_dim=even_head_dim(self.embed, self.heads),
            norms="output",
            qk_norm_whole=True,
            rope=RopeConfig.scaled(self.rope_theta, self.rope_scaling),
        )
