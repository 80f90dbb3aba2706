"""Conversations as tokens on disk, and which of them are told."""

import array
import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from colossax.data.chats.forms import Wanted, example_of
from colossax.data.chats.records import records_of
from colossax.data.chats.template import ChatTemplate
from colossax.data.encoded import TOKENS, kept_tokens
from colossax.data.hashing import lowest
from colossax.data.sources import Documents
from colossax.data.tokenizer import Tokenizer
from colossax.data.tokens import CheckedTokens
from colossax.errors import DataError, InputError

# Raise it when the same records would give other files than before.
_FORMAT_VERSION = 1
_TOLD = np.uint32(1 << 31)
_MOST_CHARS = 1 << 24


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Answers:
    """Examples of `of` documents each, a prompt with its answer; document d is of example d // of.

    Attributes:
        tokens: uint32 `[tokens]`, the highest bit set where an assistant says it.
        offsets: int64 `[documents + 1]`.
        hashes: uint64 `[examples]`, of what each says.
        good: int8 `[examples]`: of judged answers 1 or 0.
        of: Documents of an example: 2 of pairs, the chosen one first.
        fingerprint: Hash of records, template and tokenizer.
    """

    tokens: CheckedTokens | np.ndarray
    offsets: np.ndarray
    hashes: np.ndarray
    good: np.ndarray
    of: int
    fingerprint: str

    def __len__(self) -> int:
        return len(self.hashes)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of a row that each document takes: what is read of it, int64 `[documents]`."""
        return np.diff(self.offsets) - 1

    def document(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of a document, and whether each is told."""
        found = self.tokens[int(self.offsets[number]) : int(self.offsets[number + 1])]
        return (found & ~_TOLD).astype(np.int32), found >= _TOLD

    def split(self, validation_fraction: float) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of the examples to train on, and of those held out.

        As of a corpus: by the hash of what an example says, so that copies stay together, and each
        side gets one at least.

        Raises:
            DataError: There is one example alone.
        """
        if len(set(self.hashes.tolist())) < 2:
            raise DataError(
                f"data: {len(self)} examples that say the same leave nothing to hold out; give more"
            )
        held_out = lowest(self.hashes, validation_fraction) | (self.hashes == self.hashes.min())
        held_out &= self.hashes != self.hashes.max()
        return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def encode_answers(
    documents: Documents, tokenizer: Tokenizer, template: ChatTemplate, wanted: Wanted, source: str
) -> Answers:
    """Encode all records, once per files, template and tokenizer, into files of the cache.

    Args:
        documents: Files of records.
        tokenizer: How.
        template: What is made of messages.
        wanted: What each record holds; see `example_of`.
        source: Whatever else decides what the template writes, as its text.

    Raises:
        DataError: A record holds no such thing, or the template refuses it; it is named by file and
            line. Or the cache cannot be written.

    Cost: 4 bytes on disk per token; as `encode_corpus`, and the template's time, which grows with
    the square of a conversation's turns.
    """
    traits = (documents.fingerprint, tokenizer.fingerprint, wanted.name, source, _FORMAT_VERSION)
    fingerprint = hashlib.blake2b(repr(traits).encode(), digest_size=16).hexdigest()

    def write(folder: Path) -> None:
        offsets, hashes, good = array.array("q", [0]), array.array("Q"), array.array("b")
        with (folder / TOKENS).open("wb") as file:
            for each, judged in _examples(documents, template, wanted):
                digest = hashlib.blake2b(digest_size=8)
                for document in each:
                    digest.update(document.tobytes())
                    file.write(document.data)
                    offsets.append(offsets[-1] + len(document))
                hashes.append(int.from_bytes(digest.digest(), "little"))
                good.append(bool(judged))
        for name, found, dtype in (
            ("offsets", offsets, np.int64),
            ("hashes", hashes, np.uint64),
            ("good", good, np.int8),
        ):
            np.save(folder / f"{name}.npy", np.array(found, dtype))

    tokens, arrays = kept_tokens("answers", fingerprint, np.dtype(np.uint32), write)
    of = 2 if wanted is Wanted.PAIR else 1
    return Answers(tokens=tokens, **arrays, of=of, fingerprint=fingerprint)


def _examples(
    documents: Documents, template: ChatTemplate, wanted: Wanted
) -> Iterator[tuple[list[np.ndarray], bool | None]]:
    for where, record in records_of(documents):
        example = example_of(record, wanted, where)
        each = []
        for answer in example.answers:
            messages = [*example.prompt, *answer]
            try:
                tokens, told = template.told(messages, len(example.prompt))
            except InputError as problem:
                raise DataError(f"{where}: {problem}") from None
            each.append(np.where(told, _TOLD, np.uint32(0)) | np.asarray(tokens, np.uint32))
        yield each, example.good


def template_source(template: str, bos: str, eos: str) -> str:
    """What decides what a template writes of messages."""
    return json.dumps([template, bos, eos])


def chat_template(template: str, tokenizer: Tokenizer, *, bos: str, instead: str) -> ChatTemplate:
    """A template for records: longer conversations than a server takes are encoded, and told of.

    Raises:
        InputError: It is no template.
    """
    return ChatTemplate(
        template,
        tokenizer,
        bos=bos,
        eos=tokenizer.end,
        most_chars=_MOST_CHARS,
        instead=instead,
    )
