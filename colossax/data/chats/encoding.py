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
        prompts: uint64 `[examples]`, of what each asks.
        of: Documents of an example: 2 of pairs, the chosen one first.
        fingerprint: Hash of records, template and tokenizer.
        whole: Whether a document's last token is read too, and not only told.
    """

    tokens: CheckedTokens | np.ndarray
    offsets: np.ndarray
    hashes: np.ndarray
    good: np.ndarray
    prompts: np.ndarray
    of: int
    fingerprint: str
    whole: bool = False

    def __len__(self) -> int:
        return len(self.hashes)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of a row that each document takes: what is read of it, int64 `[documents]`."""
        return np.diff(self.offsets) - (not self.whole)

    def document(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of a document, and whether each is told; where it is read whole, one behind."""
        found = self.tokens[int(self.offsets[number]) : int(self.offsets[number + 1])]
        if self.whole:
            found = np.append(found, np.uint32(0))
        return (found & ~_TOLD).astype(np.int32), found >= _TOLD

    def split(
        self, validation_fraction: float, *, longest: int, least: int = 1
    ) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of the examples to train on, and of those held out.

        As of a corpus: by the hash of what an example says, so that copies stay together.

        Args:
            validation_fraction: Share that is held out.
            longest: Tokens of a row; what is longer is on neither side.
            least: Examples that say different things, of each side.

        Raises:
            DataError: Fewer than that fit into rows.
        """
        lengths = self.lengths.reshape(-1, self.of).sum(axis=1)
        fit = np.flatnonzero(lengths <= longest)
        if not fit.size:
            raise DataError(
                f"data.seq_len: rows have {longest} tokens, and the shortest example needs"
                f" {lengths.min()}; make rows longer"
            )
        hashes = self.hashes[fit]
        each = np.unique(hashes)
        if len(each) < 2 * least:
            raise DataError(
                f"data: {len(fit)} examples fit into rows of {longest} tokens, and {len(each)} of"
                f" them say different things; {2 * least} are needed, to train on and to hold out:"
                " give more, or make data.seq_len larger"
            )
        held_out = lowest(hashes, validation_fraction) | np.isin(hashes, each[:least])
        held_out &= ~np.isin(hashes, each[-least:])
        return fit[~held_out], fit[held_out]

    def ends(self) -> set[int]:
        """The tokens that the first example's answers end with."""
        return {
            int(tokens[at])
            for tokens, told in map(self.document, range(self.of))
            for at in np.flatnonzero(told & ~np.append(told[1:], False))
        }


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
        prompts = array.array("Q")
        with (folder / TOKENS).open("wb") as file:
            for each, judged in _examples(documents, template, wanted):
                for document in each:
                    file.write(document.data)
                    offsets.append(offsets[-1] + len(document))
                hashes.append(_hash(np.concatenate(each)))
                prompts.append(_hash(each[0][each[0] < _TOLD]))
                good.append(bool(judged))
        for name, found, dtype in (
            ("offsets", offsets, np.int64),
            ("hashes", hashes, np.uint64),
            ("good", good, np.int8),
            ("prompts", prompts, np.uint64),
        ):
            np.save(folder / f"{name}.npy", np.array(found, dtype))

    tokens, arrays = kept_tokens("answers", fingerprint, np.dtype(np.uint32), write)
    of = 2 if wanted is Wanted.PAIR else 1
    return Answers(tokens=tokens, of=of, fingerprint=fingerprint, whole=False, **arrays)


def _hash(tokens: np.ndarray) -> int:
    return int.from_bytes(hashlib.blake2b(tokens.tobytes(), digest_size=8).digest(), "little")


def _examples(
    documents: Documents, template: ChatTemplate, wanted: Wanted
) -> Iterator[tuple[list[np.ndarray], bool | None]]:
    for where, record in records_of(documents):
        example = example_of(record, wanted, where)
        each = []
        for answer in example.answers:
            messages = [*example.prompt, *answer]
            try:
                tokens, told = template.told(messages, len(example.prompt), example.tools)
            except InputError as problem:
                raise DataError(f"{where}: {problem}") from None
            each.append(np.where(told, _TOLD, np.uint32(0)) | np.asarray(tokens, np.uint32))
        yield each, example.good


def template_source(template: str, bos: str, eos: str) -> str:
    """What decides what a template writes of messages."""
    return json.dumps([template, bos, eos])


def chat_template(template: str, tokenizer: Tokenizer, *, bos: str, instead: str) -> ChatTemplate:
    """A template for records: of any length, and no day is written, so that each has one form.

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
        dated=False,
    )
