"""Falcon: attention and MLP side by side, one or few kv heads; ALiBi in its first form."""

import dataclasses

from colossax.config import Count, Natural, NotNegative, Positive
from colossax.nn import (
    DecoderConfig,
    FamilyConfig,
    LayerCount,
    RopeConfig,
    RopeScaling,
    even_head_dim,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FalconConfig(FamilyConfig):
    """Sizes of a Falcon: LayerNorm, a GELU MLP of two matrices, biases or not.

    Attributes:
        kv_heads: 1 in Falcon 7B, `heads` in the first form.
        mlp: Width of the MLP's hidden layer; None: 4 embed.
        parallel: Attention and MLP read the same input; else the MLP what attention added to.
        shared_norm: Both read one norm of it; Falcon 40B has one for each.
        grouped: Files hold each kv head with its queries, as those of 40B do.
        alibi: In place of rope; its penalties are divided by the root of a head's width.
        bias: Biases of all maps but the head.
        rope_theta: Base of the rotary embedding.
        rope_scaling: How it was stretched.

    Source: Almazrouei et al. 2023, The Falcon Series of Open Language Models.
    """

    vocab: Count
    embed: Count
    layers: LayerCount
    heads: Count
    kv_heads: Count = 1
    mlp: Count | None = None
    max_seq: Count = 2048
    norm_eps: NotNegative = 1e-5
    parallel: bool = True
    shared_norm: bool = True
    grouped: bool = False
    alibi: bool = False
    bias: bool = False
    rope_theta: Positive = 10_000.0
    rope_scaling: RopeScaling | None = None
    tied: bool = True
    init_std: NotNegative = 0.02
    eos: Natural | None = None

    def decoder(self) -> DecoderConfig:
        """The decoder these sizes describe."""
        head_dim = even_head_dim(self.embed, self.heads)
        return self.described(
            head_dim=head_dim,
            mlp=self.mlp or 4 * self.embed,
            norm="layer",
            activation="gelu",
            gated=False,
            alibi_scale=head_dim**-0.5,
            rope=None if self.alibi else RopeConfig.scaled(self.rope_theta, self.rope_scaling),
            qkv_bias=self.bias,
            out_bias=self.bias,
            mlp_bias=self.bias,
        )
