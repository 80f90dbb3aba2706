"""The text of a run: from a configuration to global batches on the devices."""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from colossax.data import (
    BatchLoader,
    Corpus,
    Documents,
    Mixture,
    Rows,
    RowSource,
    Split,
    Tokenizer,
    ValidationBatches,
    WholeDocuments,
    encode_corpus,
    global_arrays,
    joined,
    path_documents,
    stdlib_documents,
    train_tokenizer,
    unigram_entropy_nats,
    wanted_rows,
)
from colossax.data.hashing import keyed_permutation
from colossax.data.loader import LocalBatch
from colossax.data.rows import Row
from colossax.errors import DataError, InputError
from colossax.processes.group import Group
from colossax.sharding import NATURAL, activation_sharding
from colossax.step.arrange import Arranged
from colossax.step.step import Step
from colossax.tasks.config import DataConfig
from colossax.tasks.views import View, view_of
from colossax.typing import TOKEN_DIMS, Batch, Dims

WINDOW_ROWS = 2**16
"""Rows that are shuffled together at most."""

_ROWS_KEY = 1
"""Sets the order of rows apart from that of documents, which the same seed decides."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """The encoded text of one path.

    Attributes:
        name: Of the path, for people and metrics.
        weight: Share of the rows, at most 1.
        corpus: All documents.
        training: Those to train on.
        held_out: Those held out.
    """

    name: str
    weight: float
    corpus: Corpus
    training: Split
    held_out: Split

    def rows(self, config: DataConfig, seed: int) -> RowSource:
        """Rows to train on, by number, in a drawn order."""
        if config.packing == "whole":
            return WholeDocuments(self.training, seq_len=config.seq_len, seed=seed)
        return ShuffledRows(Rows(self.training, seq_len=config.seq_len, seed=seed), seed=seed)

    def description(self, config: DataConfig) -> str:
        """For people."""
        told = (
            f"{self.training.token_count:,} tokens in {self.training.document_count:,} documents,"
            f" {self.held_out.token_count:,} in {self.held_out.document_count:,} held out"
        )
        cut = int((self.training.lengths > config.seq_len + 1).sum())
        if config.packing == "whole" and cut:
            told += f", {cut:,} cut off after {config.seq_len:,} tokens"
        return told


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """Encoded text, split into what is trained on and what is held out.

    Attributes:
        config: What was asked for.
        seed: Of the order of documents.
        fingerprint: Hash of the documents, whatever they are called.
        tokenizer: Text to tokens and back.
        sources: One, or those of a mixture.
        view: What is made of its rows before a model sees them.
    """

    config: DataConfig
    seed: int
    fingerprint: str
    tokenizer: Tokenizer
    sources: tuple[Source, ...]
    view: View

    @property
    def unigram_entropy(self) -> float:
        """Loss, in nats per token, of the best model that knows token frequencies alone."""
        return unigram_entropy_nats(
            *(source.corpus for source in self.sources),
            weights=[source.weight for source in self.sources],
        )

    @property
    def description(self) -> tuple[str, ...]:
        """For people, a line for each source."""
        vocabulary = f", vocabulary of {self.tokenizer.vocab_size:,}"
        if self.config.masking is not None:
            vocabulary += f", {self.config.masking.rate:.0%} masked"
        if self.config.spans is not None:
            read, written = self.config.spans.lengths(self.config.seq_len)
            vocabulary += f", {read} tokens of a row read and {written} written"
        if len(self.sources) == 1:
            return (f"{self.sources[0].description(self.config)}{vocabulary}",)
        return tuple(
            f"{source.weight:.1%} {source.name}: {source.description(self.config)}{vocabulary}"
            for source in self.sources
        )

    @contextlib.contextmanager
    def batches(self, step: Step, start: int) -> Iterator[Iterator[Batch]]:
        """Endless global batches from number `start` on, made ahead by threads."""
        place = Placement(step, self.config.global_batch)
        with BatchLoader(self._rows(), place.global_batch, wanted=place.wanted, start=start) as to:
            yield map(place, to)

    def _rows(self) -> RowSource:
        each = [source.rows(self.config, self.seed) for source in self.sources]
        weights = [source.weight for source in self.sources]
        one = each[0] if len(each) == 1 else Mixture(each, weights, seed=self.seed)
        return self.view(one, self.seed)

    def held_out(self, step: Step, source: Source) -> Iterator[Batch]:
        """The held-out batches of a source, the same for every seed."""
        place = Placement(step, self.config.global_batch)
        share = source.weight * self.config.validation_batches
        batches = ValidationBatches(
            source.held_out,
            seq_len=self.config.seq_len,
            global_batch=place.global_batch,
            wanted=place.wanted,
            batches=max(1, round(share)),
            whole=self.config.packing == "whole",
            view=self.view,
        )
        return map(place, batches)


class ShuffledRows:
    """Rows in an order of their own, so that the rows of a batch come from many documents.

    Neighbouring rows are neighbouring parts of the same documents; a batch of them tells the
    optimizer about a document or two. They are dealt out within windows: of an epoch, or of
    `WINDOW_ROWS` rows where it is longer. Still every row is a function of its number alone.

    Cost: 8 bytes per row of a window, two windows are kept; the first row of one sorts it.
    """

    def __init__(self, rows: Rows, *, seed: int):
        self.seq_len = rows.seq_len
        self._rows = rows
        self._seed = seed
        self._window = min(max(1, rows.epoch_tokens // rows.seq_len), WINDOW_ROWS)
        self._lock = threading.Lock()
        self._order = functools.lru_cache(maxsize=2)(self._make_order)

    def __getitem__(self, row: int) -> Row:
        window, at = divmod(row, self._window)
        with self._lock:  # threads that meet at a new window must not all sort
            order = self._order(window)
        return self._rows[window * self._window + int(order[at])]

    def _make_order(self, window: int) -> np.ndarray:
        return keyed_permutation(self._seed, _ROWS_KEY, window, count=self._window)


class Placement:
    """Puts the rows made in this process on its devices, as parts of a global batch.

    Args:
        step: Whose devices they are.
        global_batch: Rows over all processes.
        dims: Of each array.
    """

    def __init__(self, step: Step, global_batch: int, dims: Mapping[str, Dims] = TOKEN_DIMS):
        self._arrange, self._bound, self._dims = step.batches.arrange, step.bound, dims
        self.global_batch = global_batch
        shape = (global_batch, 1)
        self.wanted = wanted_rows(activation_sharding(self._bound, ("batch", None), shape), shape)

    def __call__(self, local: LocalBatch) -> Batch:
        local = self._arrange(local)
        shardings = {
            name: activation_sharding(
                self._bound,
                self._dims[name],
                (self.global_batch, x.shape[1]),
                name=f"batch '{name}'",
            )
            for name, x in local.items()
        }
        placed = global_arrays(local, self.wanted, shardings, self.global_batch)
        return Arranged(placed, local.order if isinstance(local, Arranged) else NATURAL)


def open_text(
    config: DataConfig, model: Any, *, seed: int, group: Group, tokenizer: str | None = None
) -> Text:
    """Find the text, learn or read the tokenizer, encode.

    With several processes the first learns the tokenizer and encodes; the others wait, take its
    tokenizer, and read its encoding where they share its cache.

    Args:
        config: What to read and how.
        model: Configuration of the model, for the size of its vocabulary.
        seed: Of the order of documents.
        group: The processes.
        tokenizer: As JSON, where `config` names none.

    Raises:
        InputError: The text or the tokenizer cannot be read or does not fit the model, or the
            processes read different text.
    """
    each = group.together(lambda: [documents_of(config, path) for path in config.sources])
    documents = joined(each)
    first = group.from_first(
        lambda: [documents.fingerprint, tokenizer_of(config, documents, model, tokenizer)]
    )
    fingerprint, tokenizer_json = first
    reader = Tokenizer.from_json(tokenizer_json)
    view = view_of(config, model, reader)
    group.together(lambda: _check_same(documents, fingerprint, group.process_id))

    def encode() -> tuple[Source, ...]:
        named = zip(each, config.sources.values(), names_of(each), strict=True)
        return tuple(_source(*one, reader, config) for one in named)

    group.from_first(lambda: encode() and None)
    return Text(
        config=config,
        seed=seed,
        fingerprint=fingerprint,
        tokenizer=reader,
        sources=group.together(encode),
        view=view,
    )


def _source(
    documents: Documents, weight: float, name: str, tokenizer: Tokenizer, config: DataConfig
) -> Source:
    corpus = encode_corpus(documents, tokenizer)
    training, held_out = corpus.split(config.validation_fraction)
    return Source(name=name, weight=weight, corpus=corpus, training=training, held_out=held_out)


def names_of(each: Sequence[Documents]) -> list[str]:
    """What to call sources: the last part of each path where that tells them apart."""
    last = [Path(documents.origin).name for documents in each]
    return last if len(set(last)) == len(last) else [documents.origin for documents in each]


def documents_of(config: DataConfig, path: str | None) -> Documents:
    """The files of a path; None: the standard library's."""
    if path is None:
        return stdlib_documents()
    return path_documents(
        path, text_field=config.text_field, skip_undecodable=config.skip_undecodable
    )


def tokenizer_of(config: DataConfig, documents: Documents, model: Any, given: str | None) -> str:
    """The tokenizer as JSON, learnt or read."""
    if config.tokenizer is not None:
        tokenizer = Tokenizer.from_file(config.tokenizer)
    elif given is not None:
        tokenizer = Tokenizer.from_json(given)
    elif config.tokenizer_vocab is not None:
        tokenizer = train_tokenizer(documents, config.tokenizer_vocab)
    else:
        raise InputError(
            "data.tokenizer: this recipe has none; give the model's own with --data.tokenizer"
            " FILE, or learn a small one from the text with --data.tokenizer_vocab 4096"
        )
    if tokenizer.vocab_size > model.vocab:
        raise InputError(
            f"data.tokenizer: has {tokenizer.vocab_size} tokens,"
            f" more than the model's vocabulary of"
            f" {model.vocab}; give the model's own tokenizer, or raise model.vocab"
        )
    return tokenizer.to_json()


def _check_same(documents: Documents, fingerprint: str, process_id: int) -> None:
    if documents.fingerprint != fingerprint:
        raise DataError(
            f"{documents.origin}: process {process_id} reads other text there than process 0;"
            f" give all processes the same files"
        )
