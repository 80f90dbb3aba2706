"""GPT-2."""

import dataclasses

from colossax.config import Count, Natural, NotNegative
from colossax.nn import DecoderConfig, FamilyConfig, LayerCount, even_head_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPT2Config(FamilyConfig):
    """Sizes of a GPT-2: LayerNorm, learned positions, GELU MLP, biases, tied head.

    `max_seq` is also the size of the position table.

    Source: Radford et al. 2019.
    """

    vocab: Count
    embed: Count
    layers: LayerCount
    heads: Count
    mlp: Count
    max_seq: Count = 1024
    norm_eps: NotNegative = 1e-5
    tied: bool = True
    init_std: NotNegative = 0.02
    eos: Natural | None = None

    def decoder(self) -> DecoderConfig:
        """The decoder these sizes describe."""
        return self.described(
            kv_heads=self.heads,
            head_dim=even_head_dim(self.embed, self.heads),
            norm="layer",
            activation="gelu_tanh",
            gated=False,
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            learned_positions=self.max_seq,
        )
