"""Gemma 2: sandwich norms, bounded logits, a window in every second layer."""

import dataclasses
import math

from colossax.config import Count, Natural, NotNegative, Positive
from colossax.nn import DecoderConfig, DecoderSizes, RopeConfig, every


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma2Config(DecoderSizes):
    """Sizes of a Gemma 2: as Llama, norms on both sides of a sublayer, scores and logits capped.

    Norms multiply by 1 + their parameter; embeddings are taken times `sqrt(embed)`.

    Attributes:
        window: Keys a query sees in layers that do not see all, itself included.
        full_every: Each so many-th layer sees all keys before it; 0: none.
        score_dim: Products of queries and keys are divided by its root.
        score_cap: Bound of scores; None: they have none.
        logit_cap: Of logits.
        rope_theta: Base of the rotary embedding.

    Source: Gemma Team 2024, Gemma 2.
    """

    head_dim: Count = 256
    max_seq: Count = 8192
    norm_eps: NotNegative = 1e-6
    rope_theta: Positive = 10_000.0
    window: Count | None = 4096
    full_every: Natural = 2
    score_dim: Count = 256
    score_cap: Positive | None = 50.0
    logit_cap: Positive | None = 30.0
    tied: bool = True

    def decoder(self) -> DecoderConfig:
        """The decoder these sizes describe."""
        return self.described(
            norms="both",
            norm_from_one=True,
            activation="gelu_tanh",
            embed_scale=math.sqrt(self.embed),
            score_scale=self.score_dim**-0.5,
            rope=RopeConfig(theta=self.rope_theta),
            full_layers=every(self.full_every, self.layers),
        )
