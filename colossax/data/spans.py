"""Rows some of whose spans are left out: an encoder reads the rest, a decoder writes the spans."""

import dataclasses

import numpy as np

from colossax.data.hashing import keyed_permutation
from colossax.data.rows import Row, RowSource

_SPAN_KEY = 4
"""Sets spans apart from masks (3) and orders, of the same seed."""


@dataclasses.dataclass(frozen=True)
class SpanRows:
    """Row r of a source as a pair of texts, a function of that row, the seed and r.

    Of the n tokens of a row `told` are left out, in `spans` spans of random lengths, none of them
    empty or beside another. In the source each is one sentinel, the first `last`, the next
    `last - 1` and so on; what is to be written is each sentinel with the tokens that it stands for.
    Both texts end in `end`. So lengths are the same for every row: `n - told + spans + 1` of
    `source`, `told + spans + 1` of `tokens` (which begin with `start`), `targets` and `weights`.
    Weights are 0 of tokens whose weight is 0 in the row: what ends a document, and what fills up.

    Attributes:
        rows: Rows by number.
        told: How many tokens of a row are left out.
        spans: In how many spans.
        start: Token that what is written begins with.
        end: Token that ends both.
        last: First sentinel; the others are the numbers below it.
        seed: Of the draw.

    Cost: two sorts of a row's length.
    Source: Raffel et al. 2020, T5: 15 % of the tokens, in spans of 3 on average.
    """

    rows: RowSource
    _: dataclasses.KW_ONLY
    told: int
    spans: int
    start: int
    end: int
    last: int
    seed: int

    @property
    def seq_len(self) -> int:
        """Of the rows that spans are left out of."""
        return self.rows.seq_len

    def __getitem__(self, row: int) -> Row:
        plain = self.rows[row]
        tokens, counts = plain["tokens"], plain["weights"] > 0
        lengths = np.empty(2 * self.spans, np.int64)
        lengths[::2] = self._parts(row, 0, self.seq_len - self.told)
        lengths[1::2] = self._parts(row, 1, self.told)
        # Pieces that stay and pieces that go take turns; a sentinel stands where a piece goes.
        piece = np.repeat(np.arange(2 * self.spans), lengths)
        gone = piece % 2 == 1
        first = np.flatnonzero(gone & (np.diff(piece, prepend=-1) > 0))
        sentinels = self.last - np.arange(self.spans)
        source = np.where(gone, 0, tokens)
        source[first] = sentinels
        kept = ~gone
        kept[first] = True
        before = np.searchsorted(np.flatnonzero(gone), first)
        targets = np.insert(tokens[gone], before, sentinels)
        weights = np.insert(counts[gone], before, counts[first])
        targets = np.append(targets, self.end).astype(np.int32)
        return {
            "source": np.append(source[kept], self.end).astype(np.int32),
            "tokens": np.insert(targets[:-1], 0, self.start).astype(np.int32),
            "targets": targets,
            "weights": np.append(weights, counts.any()).astype(np.float32),
        }

    def _parts(self, row: int, which: int, total: int) -> np.ndarray:
        """`total` as a sum of as many numbers of 1 or more as there are spans, drawn."""
        drawn = keyed_permutation(self.seed, _SPAN_KEY, row, which, count=total - 1)
        cuts = np.sort(drawn[: self.spans - 1]) + 1
        return np.diff(cuts, prepend=0, append=total)
