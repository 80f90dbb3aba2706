"""Gemma 3: as Gemma 2, queries and keys normed; windows have a rotary embedding of their own."""

import dataclasses
import math

from colossax.config import Count, Natural, NotNegative, Positive
from colossax.nn import DecoderConfig, DecoderSizes, RopeConfig, RopeScaling, every


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3Config(DecoderSizes):
    """Sizes of a Gemma 3, its text model: as Gemma 2, queries and keys normed, scores not capped.

    Attributes:
        window: Keys a query sees in layers that do not see all, itself included.
        full_every: Each so many-th layer sees all keys before it; 0: none.
        score_dim: Products of queries and keys are divided by its root.
        score_cap: Bound of scores; None: they have none.
        logit_cap: Of logits.
        rope_theta: Base of the rotary embedding in layers that see all keys.
        rope_scaling: Of those.
        local_theta: Base in the others.

    Source: Gemma Team 2025, Gemma 3.
    """

    head_dim: Count = 256
    max_seq: Count = 131_072
    norm_eps: NotNegative = 1e-6
    rope_theta: Positive = 1_000_000.0
    rope_scaling: RopeScaling | None = None
    local_theta: Positive = 10_000.0
    window: Count | None = 4096
    full_every: Natural = 6
    score_dim: Count = 256
    score_cap: Positive | None = None
    logit_cap: Positive | None = None
    tied: bool = True

    def decoder(self) -> DecoderConfig:
        """The decoder these sizes describe."""
        return self.described(
            norms="both",
            norm_from_one=True,
            qk_norm=True,
            activation="gelu_tanh",
            embed_scale=math.sqrt(self.embed),
            score_scale=self.score_dim**-0.5,
            rope=RopeConfig.scaled(self.rope_theta, self.rope_scaling),
            local_rope=RopeConfig(theta=self.local_theta),
            full_layers=every(self.full_every, self.layers),
        )
