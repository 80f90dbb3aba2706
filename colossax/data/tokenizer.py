"""Byte-level BPE: learnt from the documents at hand, or read from a Hugging Face file."""

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

from colossax.config import cache_folder, check_text, user_path
from colossax.data.cache import built_once, sealed, unsealed
from colossax.data.sources import Documents
from colossax.documents import as_kind, member, parse_json, read_small, why
from colossax.errors import DataError

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCAB = 257
"""All bytes and the end of text; every further token is one merge."""

SAMPLE_BYTES = 4_000_000
_CHUNK_CHARS = 16_384
# Raise it when the same text and size would give another tokenizer, or file of it, than before.
_TRAINING_VERSION = 2

_USUAL_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
_USUAL_MASKS = ("[MASK]", "<mask>", "<|mask|>")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """Text to token ids and back.

    Text is only ever text: the characters of a special token in it are encoded as characters, so no
    document can end another. Nothing is added before or after, but by `encode_framed`.

    Attributes:
        definition: What a Hugging Face `tokenizer.json` holds.
        end: The special token that ends a document.
    """

    definition: str = dataclasses.field(repr=False)
    end: str

    def __post_init__(self):
        if self._backend.token_to_id(self.end) is None:
            raise DataError(
                f"tokenizer: has no token '{self.end}' to end documents with; name one it has"
            )

    @functools.cached_property
    def _backend(self) -> Any:
        return self._built(specials=False)

    @functools.cached_property
    def _marking(self) -> Any:
        return self._built(specials=True)

    def _built(self, *, specials: bool) -> Any:
        """What the library makes of the definition; told once whether text has special tokens."""
        import tokenizers

        try:
            backend = tokenizers.Tokenizer.from_str(self.definition)
        # The library raises plain Exception, whatever is wrong.
        except Exception as problem:  # noqa: BLE001
            raise DataError(
                f"tokenizer: is no tokenizer.json that the tokenizers library reads ({problem})"
            ) from problem
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = not specials
        return backend

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the highest token id."""
        return max(self._backend.get_vocab(with_added_tokens=True).values()) + 1

    @functools.cached_property
    def eos(self) -> int:
        """Id of the token that ends a document."""
        return self._backend.token_to_id(self.end)

    @functools.cached_property
    def mask(self) -> int | None:
        """Id of the special token that stands where one is masked; None where there is none."""
        added = {token.content: i for i, token in self._backend.get_added_tokens_decoder().items()}
        return next((added[name] for name in _USUAL_MASKS if name in added), None)

    @functools.cached_property
    def specials(self) -> Mapping[str, int]:
        """Special tokens by their characters."""
        added = self._backend.get_added_tokens_decoder()
        return {token.content: i for i, token in added.items() if token.special}

    @functools.cached_property
    def is_byte_level(self) -> bool:
        """Whether any tokens' bytes, one after another, are the bytes of their text."""
        decoder = json.loads(self._backend.to_str()).get("decoder") or {}
        return decoder.get("type") == "ByteLevel"

    def token_bytes(self, token: int) -> bytes:
        """Bytes of a token of a byte-level tokenizer; none where no token has this id."""
        found = self._found_bytes.get(token)
        if found is None:
            found = self._found_bytes[token] = _bytes_of(self._backend.id_to_token(token) or "")
        return found

    @functools.cached_property
    def _found_bytes(self) -> dict[int, bytes]:
        return {}

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of all that decides the ids."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=16).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Token ids of a text.

        Raises:
            InputError: It has half a character, a surrogate.
        """
        check_text(text, "text to encode")
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_marked(self, text: str) -> list[int]:
        """Token ids of a text in which the characters of special tokens are those tokens.

        For text that a template wrote; what a user wrote would end documents in it.

        Raises:
            InputError: It has half a character, a surrogate.
        """
        check_text(text, "text to encode")
        return self._marking.encode(text, add_special_tokens=False).ids

    def encode_framed(self, text: str) -> list[int]:
        """Token ids of a text, and around it those that the tokenizer's file puts there.

        What a model reads that tells something of a whole text, as BERT `[CLS] text [SEP]`; of a
        tokenizer whose file puts nothing there it is `encode`.

        Raises:
            InputError: It has half a character, a surrogate.
        """
        check_text(text, "text to encode")
        return self._backend.encode(text, add_special_tokens=True).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of several texts, made on all cores unless TOKENIZERS_PARALLELISM is false."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Text of token ids, special tokens included; a broken character becomes U+FFFD."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def to_json(self) -> str:
        """Everything `from_json` needs, as one JSON object with sorted keys."""
        value = {"end": self.end, "definition": json.loads(self.definition)}
        return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Tokenizer":
        """The tokenizer `to_json` wrote.

        Raises:
            DataError: The text is not what `to_json` writes.
        """
        try:
            value = parse_json(text)
            end = member(value, "end", str)
            definition = json.dumps(member(value, "definition", dict), ensure_ascii=False)
        except ValueError as problem:
            raise DataError("tokenizer: is no saved tokenizer; save or train it again") from problem
        return cls(definition=definition, end=end)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], *, end: str | None = None) -> "Tokenizer":
        """A Hugging Face `tokenizer.json`, or the one in a folder.

        Args:
            path: File or folder.
            end: The token that ends a document; None takes `eos_token` of the
                `tokenizer_config.json` beside the file, else the first it has of the usual ones.

        Raises:
            DataError: No such file, none of this form, or it has no token to end documents with.
        """
        file = user_path(path, "tokenizer", utf8=False)
        file = file / "tokenizer.json" if file.is_dir() else file
        definition = _read(file)
        try:
            added = member(parse_json(definition), "added_tokens", list)
            known = {member(token, "content", str, of="a token") for token in added}
        except ValueError as problem:
            raise DataError(
                f"{file}: is no tokenizer.json ({problem}); name the file that Hugging Face's"
                " tokenizers write"
            ) from problem
        end = end or _configured_end(file) or next((e for e in _USUAL_ENDS if e in known), None)
        if end is None:
            raise DataError(
                f"{file}: none of its special tokens is known to end a document; put the"
                f" tokenizer_config.json that names its eos_token beside it"
            )
        return cls(definition=definition, end=end)


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's writing of bytes: printable ones as themselves, the others from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    return {chr(b): b for b in shown} | {chr(0x100 + i): b for i, b in enumerate(hidden)}


def _bytes_of(written: str) -> bytes:
    """Bytes of a token as its vocabulary has it; a special one may be of other characters."""
    known = _byte_of_character()
    if any(character not in known for character in written):
        return written.encode()
    return bytes(known[character] for character in written)


def _read(file: Path) -> str:
    try:
        return read_small(file).decode()
    except UnicodeDecodeError as problem:
        raise DataError(
            f"{file}: is no tokenizer.json, for it is not UTF-8; name a tokenizer.json"
        ) from problem
    except (OSError, ValueError) as problem:
        raise DataError(
            f"{file}: cannot be read ({why(problem)}); name a tokenizer.json or its folder"
        ) from problem


def _configured_end(file: Path) -> str | None:
    config = file.with_name("tokenizer_config.json")
    if not config.is_file():
        return None
    try:
        end = parse_json(_read(config)).get("eos_token")
        end = end.get("content") if isinstance(end, dict) else end
        return as_kind(end, (str, type(None)), "'eos_token'")
    except ValueError as problem:
        raise DataError(
            f"{config}: names no end of text ({problem}); repair it or take it away from the"
            " tokenizer"
        ) from problem


def train_tokenizer(
    documents: Documents, vocab_size: int, *, sample_bytes: int = SAMPLE_BYTES
) -> Tokenizer:
    """Byte-level BPE of `vocab_size` tokens, learnt once per text and size and then cached.

    Id 0 ends documents, the bytes follow, then the merges in the order learnt. Any text can be
    encoded and comes back unchanged. Text with too few distinct words gives fewer tokens.

    It is learnt from an even sample of all documents, held-out ones included: chunks are taken
    while those taken make up less than `sample_bytes / documents.size_bytes` of those seen.

    Args:
        documents: Text to learn from.
        vocab_size: Tokens, at least `SMALLEST_VOCAB`.
        sample_bytes: Most text to learn from.

    Raises:
        DataError: The vocabulary is too small, or the documents cannot be read.

    Cost: about 0.25 CPU-seconds per MB of the sample.
    """
    if vocab_size < SMALLEST_VOCAB:
        raise DataError(
            f"tokenizer_vocab: found {vocab_size}; give {SMALLEST_VOCAB} or more, for all bytes and"
            f" the end of text"
        )
    traits = (documents.fingerprint, vocab_size, sample_bytes, _TRAINING_VERSION)
    key = hashlib.blake2b(repr(traits).encode(), digest_size=16).hexdigest()
    file = built_once(
        cache_folder() / "tokenizers" / f"{key}.json",
        lambda part: part.write_text(
            sealed(_trained(documents, vocab_size, sample_bytes), key), encoding="utf-8"
        ),
        intact=lambda file: _is_sealed(file, key),
    )
    return Tokenizer.from_json(unsealed(file.read_text(encoding="utf-8"), key))


def _trained(documents: Documents, vocab_size: int, sample_bytes: int) -> str:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_sample(documents, sample_bytes), trainer)
    return Tokenizer(definition=backend.to_str(), end=END_OF_TEXT).to_json()


def _sample(documents: Documents, sample_bytes: int) -> Iterator[str]:
    share = min(1.0, sample_bytes / max(1, documents.size_bytes))
    seen = taken = 0
    for text in documents:
        for start in range(0, len(text), _CHUNK_CHARS):
            chunk = text[start : start + _CHUNK_CHARS]
            size = len(chunk.encode())
            if taken <= seen * share:
                taken += size
                yield chunk
            seen += size
            # The size on disk says little about packed files: they end here, not at the share.
            if taken >= sample_bytes:
                return


def _is_sealed(file: Path, key: str) -> bool:
    try:
        unsealed(read_small(file).decode(), key)
    except (OSError, ValueError):
        return False
    return True
