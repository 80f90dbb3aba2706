"""OPT."""

import dataclasses

from colossax.config import Count, Natural, NotNegative
from colossax.nn import DecoderConfig, FamilyConfig, LayerCount, even_head_dim

POSITION_OFFSET = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class OPTConfig(FamilyConfig):
    """Sizes of an OPT: as GPT-2 with ReLU and a position offset of 2.

    The position table has two rows more than `max_seq`, which are never reached.

    Attributes:
        token_width: Of embeddings and head, which are mapped to `embed` and back; None: as wide.
        norm_first: Norms stand before sublayers, and one at the end; else after the sums (350M).

    Source: Zhang et al. 2022.
    """

    vocab: Count
    embed: Count
    layers: LayerCount
    heads: Count
    mlp: Count
    max_seq: Count = 2048
    norm_eps: NotNegative = 1e-5
    token_width: Count | None = None
    norm_first: bool = True
    tied: bool = True
    init_std: NotNegative = 0.02
    eos: Natural | None = None

    def decoder(self) -> DecoderConfig:
        """The decoder these sizes describe."""
        return self.described(
            kv_heads=self.heads,
            head_dim=even_head_dim(self.embed, self.heads),
            norm="layer",
            norms="input" if self.norm_first else "sum",
            final_norm=self.norm_first,
            activation="relu",
            gated=False,
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            learned_positions=self.max_seq + POSITION_OFFSET,
            position_offset=POSITION_OFFSET,
        )
