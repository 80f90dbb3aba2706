"""GPT-J: attention and MLP side by side after one norm, a part of a head turned."""

import dataclasses

from colossax.config import Count, Natural, NotNegative
from colossax.nn import DecoderConfig, FamilyConfig, LayerCount, RopeConfig, even_head_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTJConfig(FamilyConfig):
    """Sizes of a GPT-J: one LayerNorm before both sublayers, biases in MLP and head alone.

    Attributes:
        mlp: Width of the MLP's hidden layer; None: 4 embed.
        activation: Of the MLP, a key of `nn.ACTIVATIONS`.
        rope_dims: Of a head, how many dims turn, neighbours together; None: all.

    Source: Wang and Komatsuzaki 2021, GPT-J-6B.
    """

    vocab: Count
    embed: Count
    layers: LayerCount
    heads: Count
    mlp: Count | None = None
    max_seq: Count = 2048
    norm_eps: NotNegative = 1e-5
    activation: str = "gelu_tanh"
    rope_dims: Count | None = 64
    tied: bool = False
    init_std: NotNegative = 0.02
    eos: Natural | None = None

    def decoder(self) -> DecoderConfig:
        """The decoder these sizes describe."""
        return self.described(
            kv_heads=self.heads,
            head_dim=even_head_dim(self.embed, self.heads),
            mlp=self.mlp or 4 * self.embed,
            norm="layer",
            parallel=True,
            shared_norm=True,
            gated=False,
            rope=RopeConfig(dims=self.rope_dims, interleaved=True),
            mlp_bias=True,
            head_bias=True,
        )
