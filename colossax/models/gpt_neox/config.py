"""GPT-NeoX and Pythia: attention and MLP side by side, a part of a head turned."""

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
class GPTNeoXConfig(FamilyConfig):
    """Sizes of a GPT-NeoX: LayerNorm, biases, GELU; attention and MLP read the same input.

    Attributes:
        activation: Of the MLP, a key of `nn.ACTIVATIONS`.
        parallel: Else the MLP reads what attention added to.
        rope_theta: Base of the rotary embedding.
        rope_scaling: How it was stretched.
        rope_dims: Of a head, how many dims turn; None: all.
        attention_bias: Biases in attention.

    Source: Black et al. 2022, GPT-NeoX-20B; Biderman et al. 2023, Pythia.
    """

    vocab: Count
    embed: Count
    layers: LayerCount
    heads: Count
    mlp: Count
    max_seq: Count = 2048
    norm_eps: NotNegative = 1e-5
    activation: str = "gelu"
    parallel: bool = True
    rope_theta: Positive = 10_000.0
    rope_scaling: RopeScaling | None = None
    rope_dims: Count | None = None
    attention_bias: bool = True
    tied: bool = False
    init_std: NotNegative = 0.02
    eos: Natural | None = None

    def decoder(self) -> DecoderConfig:
        """The decoder these sizes describe."""
        return self.described(
            kv_heads=self.heads,
            head_dim=even_head_dim(self.embed, self.heads),
            norm="layer",
            gated=False,
            rope=RopeConfig.scaled(self.rope_theta, self.rope_scaling, dims=self.rope_dims),
            qkv_bias=self.attention_bias,
            out_bias=self.attention_bias,
            mlp_bias=True,
        )
