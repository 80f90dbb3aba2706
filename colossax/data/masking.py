"""Rows some of whose tokens are masked: those an encoder learns to tell."""

import dataclasses

import numpy as np

from colossax.data.hashing import keyed_uint64
from colossax.data.rows import Row, RowSource

_MASK_KEY = 3
"""Sets masks apart from the orders of documents, rows (1) and sources (2), of the same seed."""


@dataclasses.dataclass(frozen=True)
class MaskedRows:
    """Row r of a source with a share of its tokens masked, a function of that row, the seed and r.

    So a run that is resumed, or lies on another mesh, sees the same; and as rows are numbered
    through all epochs, each epoch masks other tokens. Each token is drawn by itself:

    - with probability `rate` it is to be told: `targets` has it, `weights` is 1, and it becomes
      `mask`, with probability `random` any token, with probability `kept` what it is;
    - else `weights` is 0.

    Whole tokens are masked, not words. The last token of a document, which ends it, and what fills
    a row up behind one are never: those whose weight is 0 in the source.

    Attributes:
        rows: Rows by number, of which `weights` says which tokens have another behind them.
        mask: Token that stands where one was masked.
        vocab: Any token is one of `[0, vocab)`.
        seed: Of the draw.
        rate: Share of the tokens that are to be told.
        random: Share of those that become any token.
        kept: Share of those that stay.

    Cost: two numbers for each token of a row.
    Source: Devlin et al. 2018, BERT, with 0.15, 0.1 and 0.1; Liu et al. 2019, RoBERTa, anew in each
    epoch.
    """

    rows: RowSource
    _: dataclasses.KW_ONLY
    mask: int
    vocab: int
    seed: int
    rate: float = 0.15
    random: float = 0.1
    kept: float = 0.1

    @property
    def seq_len(self) -> int:
        """Tokens of a row."""
        return self.rows.seq_len

    def __getitem__(self, row: int) -> Row:
        plain = self.rows[row]
        drawn = keyed_uint64(self.seed, _MASK_KEY, row, count=2 * self.seq_len)
        chance, other = drawn[: self.seq_len], drawn[self.seq_len :]
        # The 53 bits of a float64: equal on every machine.
        share = (chance >> np.uint64(11)) * 2.0**-53 / self.rate
        told = (share < 1) & (plain["weights"] > 0)
        tokens = np.where(share < 1 - self.random - self.kept, self.mask, plain["tokens"])
        anything = (share >= 1 - self.random - self.kept) & (share < 1 - self.kept)
        tokens = np.where(anything, other % np.uint64(self.vocab), tokens)
        return plain | {
            "tokens": np.where(told, tokens, plain["tokens"]).astype(np.int32),
            "targets": plain["tokens"],
            "weights": told.astype(np.float32),
        }
