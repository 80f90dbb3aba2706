"""Random tokens in place of text: for measuring, where neither text nor tokenizer matters."""

import numpy as np

from colossax.data.hashing import keyed_uint64
from colossax.data.rows import Row


class SyntheticRows:
    """Row r of uniformly random tokens, one document per row; needs numpy alone.

    `targets` is the next token, for the last of a row one that is not shown; all weights are 1.

    Args:
        vocab_size: Tokens lie in `[0, vocab_size)`.
        seq_len: Tokens per row.
        seed: Of the tokens.
    """

    def __init__(self, *, vocab_size: int, seq_len: int, seed: int):
        self.seq_len = seq_len
        self._vocab_size = vocab_size
        self._seed = seed

    def __getitem__(self, row: int) -> Row:
        drawn = keyed_uint64(self._seed, row, count=self.seq_len + 1)
        text = (drawn % np.uint64(self._vocab_size)).astype(np.int32)
        return {
            "tokens": text[:-1],
            "targets": text[1:],
            "segments": np.zeros(self.seq_len, np.int32),
            "positions": np.arange(self.seq_len, dtype=np.int32),
            "weights": np.ones(self.seq_len, np.float32),
        }
