"""Phi-3, Phi-3.5 and Phi-4: Llama's parts, a part of a head turned, LongRoPE."""

import dataclasses

from colossax.config import Count, NotNegative, Positive
from colossax.nn import DecoderConfig, DecoderSizes, RopeConfig, RopeScaling, even_head_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phi3Config(DecoderSizes):
    """Sizes of a Phi-3 or Phi-4: as Llama, within a window or not.

    Attributes:
        window: Keys a query sees, itself included; None: all before it.
        rope_theta: Base of the rotary embedding.
        rope_scaling: How it was stretched.
        rope_dims: Of a head, how many dims turn; None: all.

    Source: Abdin et al. 2024, Phi-3; Abouelenin et al. 2025, Phi-4-Mini.
    """

    max_seq: Count = 4096
    norm_eps: NotNegative = 1e-5
    rope_theta: Positive = 10_000.0
    rope_scaling: RopeScaling | None = None
    rope_dims: Count | None = None
    window: Count | None = None
    tied: bool = False

    def decoder(self) -> DecoderConfig:
        """The decoder these sizes describe."""
        return self.described(
            head_dim=even_head_dim(self.embed, self.heads),
            rope=RopeConfig.scaled(self.rope_theta, self.rope_scaling, dims=self.rope_dims),
        )
