"""ModernBERT: an encoder with rope, most of whose layers see a window."""

import dataclasses

from colossax.config import Count, NotNegative, Positive
from colossax.nn import DecoderConfig, EncoderSizes, RopeConfig, TransformConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModernBERTConfig(EncoderSizes):
    """Sizes of a ModernBERT: gated GELU MLP, norms of inputs but the first.

    Attributes:
        window: Half of it is seen on each side of a token, in layers that do not see all.
        full_every: The first layer and each so many-th behind it see all tokens.
        rope_theta: Base of the rotary embedding of those layers.
        local_theta: Of the others.
        transformed: What stands before each head of the family.
        head_bias: A number is added to each token's logit.

    Source: Warner et al. 2024.
    """

    max_seq: Count = 8192
    norm_eps: NotNegative = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    window: Count = 128
    full_every: Count = 3
    rope_theta: Positive = 160_000.0
    local_theta: Positive = 10_000.0
    transformed: TransformConfig = TransformConfig(bias=False)
    head_bias: bool = True

    def decoder(self) -> DecoderConfig:
        """The encoder these sizes describe."""
        return self.described(
            first_norm=False,
            qkv_bias=self.attention_bias,
            out_bias=self.attention_bias,
            full_layers=tuple(range(0, self.layers, self.full_every)),
            rope=RopeConfig(theta=self.rope_theta),
            local_rope=RopeConfig(theta=self.local_theta),
        )
