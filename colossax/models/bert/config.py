"""BERT: an encoder of norms after sums."""

import dataclasses

from colossax.config import Count, Natural, NotNegative
from colossax.nn import DecoderConfig, EncoderSizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class BERTConfig(EncoderSizes):
    """Sizes of a BERT: learned positions and kinds of tokens, an MLP of two matrices, biases.

    Attributes:
        max_seq: Rows of the position table that are reached, too.
        token_types: Rows of the table of kinds of tokens.

    Source: Devlin et al. 2018.
    """

    max_seq: Count = 512
    token_types: Natural = 2
    norm_eps: NotNegative = 1e-12

    @property
    def position_offset(self) -> int:
        """Rows of the position table before the first that is reached."""
        return 0

    def decoder(self) -> DecoderConfig:
        """The encoder these sizes describe."""
        return self.described(
            norms="sum",
            final_norm=False,
            gated=False,
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            learned_positions=self.max_seq + self.position_offset,
            head_bias=True,
        )
