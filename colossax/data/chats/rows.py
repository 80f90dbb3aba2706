"""Rows of whole prompts and answers, several to a row."""

import functools
import threading
from collections.abc import Sequence

import numpy as np

from colossax.data.chats.encoding import Answers
from colossax.data.hashing import keyed_permutation
from colossax.data.rows import Row
from colossax.errors import DataError

_ROWS_KEY, _OTHERS_KEY = 3, 4
"""Set the orders of rows and of other answers apart from those of the same seed elsewhere."""

MISMATCHED = "mismatched_"
"""Before the names of arrays of a row whose answers are to other prompts."""


def packed(
    lengths: Sequence[int] | np.ndarray, *, seq_len: int, most: int
) -> tuple[list[list[int]], list[int]]:
    """Which items share a row, and which fit into none.

    The longest first, each into the fullest row that has room for it (best fit).

    Args:
        lengths: Of the items, in tokens.
        seq_len: Tokens of a row.
        most: Items of a row at most.

    Cost: one sort, and a look into a set of `seq_len` bits for each item.
    """
    rows: list[list[int]] = []
    left_out = [at for at, length in enumerate(lengths) if length > seq_len]
    with_space: list[list[int]] = [[] for _ in range(seq_len + 1)]  # rows that may take more
    known = 0  # bit n: a row has room for n tokens
    for at in np.argsort(-np.asarray(lengths, np.int64), kind="stable").tolist():
        length = int(lengths[at])
        if length > seq_len:
            continue
        if fitting := known >> length:
            space = length + (fitting & -fitting).bit_length() - 1
            row = with_space[space].pop()
            if not with_space[space]:
                known &= ~(1 << space)
        else:
            space, row = seq_len, len(rows)
            rows.append([])
        rows[row].append(at)
        if len(rows[row]) < most:
            with_space[space - length].append(row)
            known |= 1 << (space - length)
    return rows, left_out


class AnswerRows:
    """Row r as a function of the examples, the sequence length, the seed and r.

    - `tokens`, `targets`, `positions`: as of text; each document is a prompt with its answer.
    - `weights`: 1 where an assistant says the target, else 0.
    - `segments`: number of the document within the row; -1 behind the last.

    An example's documents share a row, next to each other, the chosen one of a pair first. Which
    examples share a row is the same in each epoch, the order of the rows is drawn.

    Args:
        answers: All examples.
        examples: Numbers of those that count.
        seq_len: Tokens per row.
        documents: Of a row at most.
        seed: Of the order.
        alone: Whether an example has a row of its own.
        epochs: After so many the weights are 0; None: never.

    Attributes:
        count: Rows of an epoch.
        left_out: Numbers of the examples that are longer than a row.

    Raises:
        DataError: No example fits into a row.

    Cost: O(s) per row; each epoch sorts its rows.
    """

    def __init__(
        self,
        answers: Answers,
        examples: np.ndarray,
        *,
        seq_len: int,
        documents: int,
        seed: int,
        alone: bool = False,
        epochs: int | None = None,
    ):
        self.seq_len, self.documents = seq_len, documents
        lengths = answers.lengths.reshape(-1, answers.of).sum(axis=1)[examples]
        most = 1 if alone else documents // answers.of
        shared, left_out = packed(lengths, seq_len=seq_len, most=most)
        if not shared:
            raise DataError(
                f"data.seq_len: rows have {seq_len} tokens, and the shortest example needs"
                f" {lengths.min()}; make rows longer"
            )
        self.count, self.left_out = len(shared), examples[left_out]
        self._rows = [examples[row] for row in shared]
        self._answers, self._seed, self._epochs = answers, seed, epochs
        self._lock = threading.Lock()
        self._order = functools.lru_cache(maxsize=2)(self._make_order)

    def __getitem__(self, row: int) -> Row:
        epoch, at = divmod(row, self.count)
        found = self.filled([self._answers.document(n) for n in self._documents(row)])
        if self._epochs is not None and epoch >= self._epochs:
            found["weights"][:] = 0
        return found

    def examples(self, row: int) -> np.ndarray:
        """Numbers of the examples of a row."""
        epoch, at = divmod(row, self.count)
        with self._lock:  # threads that meet at a new epoch must not all sort
            order = self._order(epoch)
        return self._rows[int(order[at])]

    def filled(self, documents: Sequence[tuple[np.ndarray, np.ndarray]]) -> Row:
        """See `filled_row`."""
        return filled_row(documents, self.seq_len)

    def _documents(self, row: int) -> list[int]:
        of = self._answers.of
        return [of * int(n) + part for n in self.examples(row) for part in range(of)]

    def _make_order(self, epoch: int) -> np.ndarray:
        return keyed_permutation(self._seed, _ROWS_KEY, epoch, count=self.count)


def filled_row(documents: Sequence[tuple[np.ndarray, np.ndarray]], seq_len: int) -> Row:
    """A row of documents, their tokens and which are told; see `AnswerRows`."""
    names = ("tokens", "targets", "positions")
    out: Row = {name: np.zeros(seq_len, np.int32) for name in names}
    out["segments"] = np.full(seq_len, -1, np.int32)
    out["weights"] = np.zeros(seq_len, np.float32)
    at = 0
    for number, (tokens, told) in enumerate(documents):
        span = slice(at, at + len(tokens) - 1)
        out["tokens"][span], out["targets"][span] = tokens[:-1], tokens[1:]
        out["positions"][span] = np.arange(len(tokens) - 1)
        out["segments"][span] = number
        out["weights"][span] = told[1:]
        at = span.stop
    return out


class JudgedRows(AnswerRows):
    """`AnswerRows` of judged answers, with what KTO asks beside them.

    - `desirable`: int32 `[documents]`, 1 for a good answer.
    - `mismatched_tokens`, ...: a row of the same prompts, each with the answer to another prompt:
      the next of them in a cycle through all examples, which is drawn for each epoch.

    What does not fit of such a row is left out of it.

    Raises:
        DataError: All examples answer one prompt.
    """

    def __init__(self, answers: Answers, examples: np.ndarray, **how):
        super().__init__(answers, examples, **how)
        self._fit = np.setdiff1d(examples, self.left_out)
        if len(np.unique(answers.prompts[self._fit])) < 2:
            raise DataError(
                f"data: {len(self._fit)} examples, all there are to train on or to hold out, answer"
                " one prompt alone, and kto asks for answers to others; give more, or another"
                " data.validation_fraction"
            )
        self._cycle = functools.lru_cache(maxsize=2)(self._make_cycle)

    def __getitem__(self, row: int) -> Row:
        out, epoch = super().__getitem__(row), row // self.count
        examples = self.examples(row)
        with self._lock:
            order, place = self._cycle(epoch)
        crossed = [self._crossed(int(n), self._other(order, place[int(n)])) for n in examples]
        room = np.cumsum([len(tokens) - 1 for tokens, _ in crossed]) <= self.seq_len
        beside = self.filled([one for one, fits in zip(crossed, room, strict=True) if fits])
        good = np.zeros(self.documents, np.int32)
        good[: len(examples)] = self._answers.good[examples]
        if self._epochs is not None and epoch >= self._epochs:
            beside["weights"][:] = 0
        return {**out, **{MISMATCHED + name: x for name, x in beside.items()}, "desirable": good}

    def _other(self, order: np.ndarray, at: int) -> int:
        """The next example of another prompt."""
        prompts = self._answers.prompts
        own = prompts[order[at]]
        while prompts[order[at]] == own:
            at = (at + 1) % len(order)
        return int(order[at])

    def _crossed(self, prompt: int, answer: int) -> tuple[np.ndarray, np.ndarray]:
        """The prompt of one example with the answer of another, each example one document."""
        asked, said = (self._answers.document(n) for n in (prompt, answer))
        parts = asked[0][~asked[1]], said[0][said[1]]
        return np.concatenate(parts), np.repeat([False, True], [len(part) for part in parts])

    def _make_cycle(self, epoch: int) -> tuple[np.ndarray, dict[int, int]]:
        """The examples that fit in a drawn order, and the place of each in it."""
        order = self._fit[keyed_permutation(self._seed, _OTHERS_KEY, epoch, count=len(self._fit))]
        return order, {int(n): at for at, n in enumerate(order)}
