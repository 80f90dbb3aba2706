"""BERT: an encoder of norms after sums, whose head transforms hidden states first."""

import dataclasses

from colossax.config import Count, Natural, NotNegative
from colossax.nn import (
    DecoderConfig,
    FamilyConfig,
    LayerCount,
    TransformConfig,
    even_head_dim,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BERTConfig(FamilyConfig):
    """Sizes of a BERT: learned positions and kinds of tokens, GELU MLP, biases, tied head.

    Attributes:
        max_seq: Rows of the position table that are reached, too.
        token_types: Rows of the table of kinds of tokens.

    Source: Devlin et al. 2018.
    """

    vocab: Count
    embed: Count
    layers: LayerCount
    heads: Count
    mlp: Count
    max_seq: Count = 512
    token_types: Natural = 2
    norm_eps: NotNegative = 1e-12
    activation: str = "gelu"
    tied: bool = True
    init_std: NotNegative = 0.02
    eos: Natural | None = None

    @property
    def position_offset(self) -> int:
        """Rows of the position table before the first that is reached."""
        return 0

    @property
    def transformed(self) -> TransformConfig:
        """What stands before logits of the vocabulary."""
        return TransformConfig(activation=self.activation)

    def decoder(self) -> DecoderConfig:
        """The encoder these sizes describe."""
        return self.described(
            causal=False,
            kv_heads=self.heads,
            head_dim=even_head_dim(self.embed, self.heads),
            norm="layer",
            norms="sum",
            final_norm=False,
            gated=False,
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            learned_positions=self.max_seq + self.position_offset,
            embed_norm=True,
            head_bias=True,
            transform=self.transformed if self.head is None else None,
        )
