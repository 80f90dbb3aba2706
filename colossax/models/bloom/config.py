"""BLOOM."""

import dataclasses

from colossax.config import Count, Natural, NotNegative
from colossax.nn import DecoderConfig, FamilyConfig, LayerCount, even_head_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class BloomConfig(FamilyConfig):
    """Sizes of a BLOOM: ALiBi, LayerNorm also after the embedding, GELU MLP of 4 embed, tied head.

    `max_seq` bounds a sequence only: ALiBi itself has no longest position.

    Source: Le Scao et al. 2022.
    """

    vocab: Count
    embed: Count
    layers: LayerCount
    heads: Count
    max_seq: Count = 2048
    norm_eps: NotNegative = 1e-5
    tied: bool = True
    init_std: NotNegative = 0.02
    eos: Natural | None = None

    def decoder(self) -> DecoderConfig:
        """The decoder these sizes describe."""
        return self.described(
            kv_heads=self.heads,
            head_dim=even_head_dim(self.embed, self.heads),
            mlp=4 * self.embed,
            norm="layer",
            activation="gelu_tanh",
            gated=False,
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            alibi=True,
            embed_norm=True,
        )
