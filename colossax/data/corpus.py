"""Documents as one array of tokens on disk, and which of them are held out."""

import array
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from colossax.data.encoded import TOKENS, kept_tokens
from colossax.data.hashing import lowest
from colossax.data.sources import Documents
from colossax.data.tokenizer import Tokenizer
from colossax.data.tokens import CheckedTokens
from colossax.errors import DataError

# Raise it when the same text and tokenizer would give other files than before.
_FORMAT_VERSION = 1
_BATCH_CHARS = 1_000_000
_BATCH_DOCUMENTS = 4096


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Split:
    """Some documents of a corpus; document i is `tokens[starts[i] : starts[i] + lengths[i]]`.

    Attributes:
        tokens: uint16 or uint32, those of the whole corpus.
        starts: int64 `[documents]`.
        lengths: int64 `[documents]`, the closing end of text included.
    """

    tokens: CheckedTokens | np.ndarray
    starts: np.ndarray
    lengths: np.ndarray

    @property
    def document_count(self) -> int:
        """How many documents."""
        return len(self.starts)

    @property
    def token_count(self) -> int:
        """Tokens of all documents."""
        return int(self.lengths.sum())


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """Encoded documents, each followed by the end of text. Holds 24 bytes per document in memory.

    Attributes:
        tokens: uint16 or uint32, read from disk and checked block by block.
        offsets: int64 `[documents + 1]`; document i is `tokens[offsets[i] : offsets[i + 1]]`.
        hashes: uint64 `[documents]`, of each text.
        counts: int64 `[vocab]`, how often each token occurs.
        vocab_size: Of the tokenizer.
        eos: Token that ends a document.
        fingerprint: Hash of text and tokenizer.
    """

    tokens: CheckedTokens | np.ndarray
    offsets: np.ndarray
    hashes: np.ndarray
    counts: np.ndarray
    vocab_size: int
    eos: int
    fingerprint: str

    @property
    def document_count(self) -> int:
        """How many documents."""
        return len(self.hashes)

    def whole(self) -> Split:
        """All documents."""
        return self._select(np.arange(self.document_count))

    def split(self, validation_fraction: float) -> tuple[Split, Split]:
        """Documents to train on and documents held out.

        A document is held out when the hash of its text, as a number in [0, 1), lies below the
        fraction: the same text falls on the same side in any corpus, copies together. The lowest
        hash is held out and the highest is not, so that each side gets at least one document. Of a
        corpus that is one document, its last tokens are held out; what is left to train on has no
        end of text.

        Args:
            validation_fraction: Share of the documents held out, in (0, 1).

        Returns:
            Training split and held-out split.

        Raises:
            DataError: The only document has fewer than four tokens.
        """
        if self.document_count == 1:
            return self._cut(validation_fraction)
        held_out = lowest(self.hashes, validation_fraction)
        order = np.argsort(self.hashes, kind="stable")
        held_out[order[0]], held_out[order[-1]] = True, False
        return self._select(np.flatnonzero(~held_out)), self._select(np.flatnonzero(held_out))

    def _select(self, documents: np.ndarray) -> Split:
        lengths = np.diff(self.offsets)
        return Split(tokens=self.tokens, starts=self.offsets[documents], lengths=lengths[documents])

    def _cut(self, validation_fraction: float) -> tuple[Split, Split]:
        total = len(self.tokens)
        if total < 4:
            raise DataError(
                f"data: one document of {total} tokens leaves nothing to hold out; give more text"
            )
        kept = total - min(max(round(total * validation_fraction), 2), total - 2)
        first, last = ((0, kept), (kept, total - kept))
        return self._span(*first), self._span(*last)

    def _span(self, start: int, length: int) -> Split:
        return Split(tokens=self.tokens, starts=np.array([start]), lengths=np.array([length]))


def unigram_entropy_nats(*corpora: Corpus, weights: Sequence[float] = (1.0,)) -> float:
    """-Σ p ln p, p the share of each token among all text, held-out documents included.

    It is the loss of the best model that knows only how frequent tokens are: a model that learnt
    anything else lies below.

    Args:
        corpora: Of one tokenizer.
        weights: Of each corpus; they add up to 1.
    """
    each = zip(weights, corpora, strict=True)
    shares = [weight * corpus.counts / corpus.counts.sum() for weight, corpus in each]
    share = np.sum(shares, axis=0)
    share = share[share > 0]
    return float(-(share * np.log(share)).sum())


def encode_corpus(
    documents: Documents,
    tokenizer: Tokenizer,
    *,
    progress: Callable[[int], None] | None = None,
) -> Corpus:
    """Encode all documents, once per text and tokenizer, into files of the cache.

    Args:
        documents: What to encode.
        tokenizer: How.
        progress: Told after every batch how many tokens there are so far.

    Raises:
        DataError: A document cannot be read, or the cache cannot be written.

    Cost: 0.3 to 0.4 CPU-seconds per MB of text, 2 or 4 bytes on disk per token. Memory holds one
    document and the encoding of 1 MB of text, whatever the size of the corpus. Documents longer
    than that are encoded in chunks cut before a line end, where one exists.
    """
    traits = (documents.fingerprint, tokenizer.fingerprint, _FORMAT_VERSION)
    fingerprint = hashlib.blake2b(repr(traits).encode(), digest_size=16).hexdigest()
    told = progress or (lambda tokens: None)

    tokens, arrays = kept_tokens(
        "corpora",
        fingerprint,
        _dtype(tokenizer),
        lambda part: _encode_into(part, documents, tokenizer, told),
    )
    return Corpus(
        tokens=tokens,
        **arrays,
        vocab_size=tokenizer.vocab_size,
        eos=tokenizer.eos,
        fingerprint=fingerprint,
    )


def _dtype(tokenizer: Tokenizer) -> np.dtype:
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)


def _encode_into(
    folder: Path, documents: Documents, tokenizer: Tokenizer, progress: Callable[[int], None]
) -> None:
    dtype = _dtype(tokenizer)
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    offsets, hashes, total = array.array("q", [0]), array.array("Q"), 0
    with (folder / TOKENS).open("wb") as file:
        for batch in _batches(_chunks(documents)):
            encoded = tokenizer.encode_batch([chunk for chunk, _ in batch])
            for ids, (_, text_hash) in zip(encoded, batch, strict=True):
                if text_hash is not None:
                    ids.append(tokenizer.eos)
                tokens = np.array(ids, dtype)
                counts += np.bincount(tokens, minlength=len(counts))
                file.write(tokens.data)
                total += len(tokens)
                if text_hash is not None:
                    offsets.append(total)
                    hashes.append(text_hash)
            progress(total)
    np.save(folder / "offsets.npy", np.array(offsets, np.int64))
    np.save(folder / "hashes.npy", np.array(hashes, np.uint64))
    np.save(folder / "counts.npy", counts)


_Chunk = tuple[str, int | None]
"""Text, and with the last chunk of a document the hash of the whole document."""


def _chunks(documents: Documents) -> Iterator[_Chunk]:
    for text in documents:
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        start = 0
        while len(text) - start > _BATCH_CHARS:
            stop = start + _BATCH_CHARS
            line_end = text.rfind("\n", start + _BATCH_CHARS // 2, stop)
            stop = stop if line_end < 0 else line_end
            yield text[start:stop], None
            start = stop
        yield text[start:], int.from_bytes(digest, "little")


def _batches(chunks: Iterator[_Chunk]) -> Iterator[list[_Chunk]]:
    batch: list[_Chunk] = []
    chars = 0
    for chunk in chunks:
        if batch and (chars + len(chunk[0]) > _BATCH_CHARS or len(batch) == _BATCH_DOCUMENTS):
            yield batch
            batch, chars = [], 0
        batch.append(chunk)
        chars += len(chunk[0])
    if batch:
        yield batch
