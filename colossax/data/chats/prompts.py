"""Prompts as tokens, each with the record that it is from, which says what a good answer is."""

import dataclasses
import functools
import hashlib
import threading
from typing import Any

import numpy as np

from colossax.data.chats.forms import Message, Wanted, example_of
from colossax.data.chats.records import records_of
from colossax.data.chats.template import ChatTemplate
from colossax.data.hashing import keyed_permutation, lowest
from colossax.data.sources import Documents
from colossax.errors import DataError, InputError

_ORDER_KEY = 5
"""Sets the order of prompts apart from those of the same seed elsewhere."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """What a model is asked.

    Attributes:
        tokens: By the template, up to where an assistant is to answer.
        messages: That these are of.
        record: All fields of the line.
        tools: Functions that the prompt says may be called.
    """

    tokens: tuple[int, ...]
    messages: tuple[Message, ...]
    record: dict[str, Any]
    tools: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Prompts:
    """The prompts of files, in their order.

    Attributes:
        prompts: All of them.
        fingerprint: Hash of what is asked and of the records.
    """

    prompts: tuple[Prompt, ...]
    fingerprint: str

    def split(self, validation_fraction: float, *, longest: int) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of the prompts to learn from, and of those held out: by the hash of each.

        Args:
            validation_fraction: Share that is held out.
            longest: Tokens of a prompt; what is longer is on neither side.

        Raises:
            DataError: Fewer than two different ones are so short.
        """
        lengths = np.asarray([len(one.tokens) for one in self.prompts])
        short = np.flatnonzero(lengths <= longest)
        hashes = np.asarray([_hash(self.prompts[at].tokens) for at in short], np.uint64)
        each = np.unique(hashes)
        if len(each) < 2:
            raise DataError(
                f"data: {len(short)} of {len(lengths)} prompts have {longest} tokens or fewer, for"
                f" which there is room beside an answer, and {len(each)} of them differ; 2 are"
                f" needed, to learn from and to hold out: give more, or make data.seq_len larger"
                f" (the shortest prompt has {lengths.min()} tokens)"
            )
        held_out = (lowest(hashes, validation_fraction) | (hashes == each[0])) & (
            hashes != each[-1]
        )
        return short[~held_out], short[held_out]


class PromptOrder:
    """Number of prompt r as a function of the prompts that count, the seed and r.

    Each epoch has all of them in an order of its own. As a source of a mixture it gives rows of one
    number, `prompt`.

    Args:
        numbers: Of the prompts that count.
        seed: Of the order.
        first: What is added to a number.
    """

    seq_len = 1

    def __init__(self, numbers: np.ndarray, *, seed: int, first: int = 0):
        self._numbers, self._seed, self._first = numbers, seed, first
        self._lock = threading.Lock()
        self._order = functools.lru_cache(maxsize=2)(self._make_order)

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        epoch, at = divmod(row, len(self._numbers))
        with self._lock:
            order = self._order(epoch)
        return {"prompt": np.asarray([self._first + self._numbers[int(order[at])]])}

    def _make_order(self, epoch: int) -> np.ndarray:
        return keyed_permutation(self._seed, _ORDER_KEY, epoch, count=len(self._numbers))


def read_prompts(documents: Documents, template: ChatTemplate) -> Prompts:
    """Read all records of files.

    Args:
        documents: Files of records.
        template: What is made of messages.

    Raises:
        DataError: A record asks nothing, or the template refuses it; names file and line.

    Cost: all records in memory; time as of encoding their text, each time.
    """
    found, hashed = [], hashlib.blake2b(digest_size=16)
    for where, record in records_of(documents):
        example = example_of(record, Wanted.PROMPT, where)
        try:
            tokens = tuple(template.tokens(example.prompt, example.tools))
        except InputError as problem:
            raise DataError(f"{where}: {problem}") from None
        if not tokens:
            raise DataError(f"{where}: the template writes nothing of it; give another template")
        hashed.update(repr((tokens, record)).encode())
        tools = tuple(example.tools)
        found.append(
            Prompt(tokens=tokens, messages=example.prompt, record=dict(record), tools=tools)
        )
    return Prompts(prompts=tuple(found), fingerprint=hashed.hexdigest())


def _hash(tokens: tuple[int, ...]) -> int:
    data = np.asarray(tokens, np.uint32).tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
