"""Rows of equal length cut from shuffled documents; each can be made without those before it.

An epoch is every document of the split once, in an order drawn from the seed and the epoch's
number. The epochs follow one another as one endless sequence of tokens, and row r is its tokens
`[r s, (r + 1) s)`: a row may end in the middle of a document, which the next goes on with, and may
reach over the border of two epochs. So no token is padding and none is left out.
"""

import functools
import threading
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from colossax.data.corpus import Split
from colossax.data.hashing import keyed_permutation

_EPOCHS_KEPT = 2

Row = dict[str, np.ndarray]
"""`tokens targets segments positions` int32 and `weights` float32, each `[seq_len]`."""


@runtime_checkable
class RowSource(Protocol):
    """Rows by number; equal numbers give equal rows."""

    @property
    def seq_len(self) -> int: ...

    def __getitem__(self, row: int) -> Row: ...


def stack_rows(source: RowSource, numbers: Sequence[int]) -> dict[str, np.ndarray]:
    """The rows of these numbers, each array `[len(numbers), seq_len]`."""
    rows = [source[number] for number in numbers]
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


class _OrderedDocuments:
    """Documents in an order for each epoch, which the last two keep; several threads may ask."""

    def __init__(self, split: Split, *, seq_len: int, seed: int, epochs: int | None = None):
        self.seq_len = seq_len
        self._split = split
        self._tokens = split.tokens
        self._seed = seed
        self._epochs = epochs
        self._lock = threading.Lock()
        self._order = functools.lru_cache(maxsize=_EPOCHS_KEPT)(self._make_order)

    def _epoch(self, epoch: int) -> Any:
        # Threads that meet at a new epoch must not all sort.
        with self._lock:
            return self._order(epoch)

    def _make_order(self, epoch: int) -> Any:
        return keyed_permutation(self._seed, epoch, count=self._split.document_count)


class Rows(_OrderedDocuments):
    """Row r as a pure function of the split's tokens, the sequence length, the seed and r.

    - `tokens`: the text, `targets`: the next token of the same document, in or beyond the row.
    - `weights`: 1, but 0 where a document ends and there is no next token; `targets` repeats the
      token there.
    - `segments`: number of the document within the row, from 0.
    - `positions`: from 0 where a document starts, and where the row does.

    Orders come from SplitMix64 and a stable sort, so that they depend on no library's generator.

    Args:
        split: Documents.
        seq_len: Tokens per row, s.
        seed: Of the order of documents.
        epochs: After so many the weights are 0; None: never.

    Cost: O(s + log D) per row of D documents. The first row of an epoch sorts D numbers; the last
    two epochs are kept, 16 bytes per document each. Several threads may read.
    """

    def __init__(self, split: Split, *, seq_len: int, seed: int, epochs: int | None = None):
        super().__init__(split, seq_len=seq_len, seed=seed, epochs=epochs)
        self.epoch_tokens = split.token_count

    def __getitem__(self, row: int) -> Row:
        out: Row = {name: np.empty(self.seq_len, np.int32) for name in _INTEGERS}
        out["weights"] = np.ones(self.seq_len, np.float32)
        epoch, at = divmod(row * self.seq_len, self.epoch_tokens)
        filled = documents = 0
        while filled < self.seq_len:
            count = min(self.seq_len - filled, self.epoch_tokens - at)
            part = {name: array[filled : filled + count] for name, array in out.items()}
            documents = self._fill(part, epoch, at, documents)
            filled, epoch, at = filled + count, epoch + 1, 0
        return out

    def _fill(self, part: Row, epoch: int, at: int, documents: int) -> int:
        """Write the tokens of an epoch from `at` on; returns the number of the next segment."""
        order, ends = self._epoch(epoch)
        stop = at + len(part["tokens"])
        first = int(np.searchsorted(ends, at, side="right")) - 1
        last = int(np.searchsorted(ends, stop, side="left"))
        opens, closes = ends[first:last], ends[first + 1 : last + 1]
        begins = np.maximum(opens, at)
        segment = np.repeat(np.arange(last - first), np.minimum(closes, stop) - begins)
        position = np.arange(stop - at) - (begins - at)[segment]
        source = (self._split.starts[order[first:last]] + begins - opens)[segment] + position
        final = closes[closes <= stop] - at - 1
        part["tokens"][:] = self._tokens[source]
        source += 1
        source[final] -= 1
        part["targets"][:] = self._tokens[source]
        part["segments"][:] = segment + documents
        part["positions"][:] = position
        part["weights"][final] = 0
        if self._epochs is not None and epoch >= self._epochs:
            part["weights"][:] = 0
        return documents + last - first

    def _make_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Documents in their order, and the tokens before each of them and after the last."""
        order = super()._make_order(epoch)
        ends = np.zeros(len(order) + 1, np.int64)
        np.cumsum(self._split.lengths[order], out=ends[1:])
        return order, ends


class WholeDocuments(_OrderedDocuments):
    """Row r is one document from its start, in the order of `Rows`.

    What a document has beyond a row is left out; what a row has beyond its document has weight 0
    and is a segment of its own.

    Args:
        split: Documents.
        seq_len: Tokens per row.
        seed: Of the order of documents.
        epochs: After so many the weights are 0; None: never.

    Cost: O(s) per row; the first row of an epoch sorts as many numbers as there are documents.
    """

    def __getitem__(self, row: int) -> Row:
        epoch, at = divmod(row, self._split.document_count)
        document = self._epoch(epoch)[at]
        start, length = int(self._split.starts[document]), int(self._split.lengths[document])
        count = min(self.seq_len, length)
        place = np.arange(self.seq_len)
        source = start + np.minimum(place, length - 1)
        ended = place >= length - 1
        gone = self._epochs is not None and epoch >= self._epochs
        return {
            "tokens": self._tokens[source].astype(np.int32),
            "targets": self._tokens[source + ~ended].astype(np.int32),
            "segments": (place >= count).astype(np.int32),
            "positions": np.where(place < count, place, place - count).astype(np.int32),
            "weights": np.where(ended | gone, 0, 1).astype(np.float32),
        }


_INTEGERS = ("tokens", "targets", "segments", "positions")
