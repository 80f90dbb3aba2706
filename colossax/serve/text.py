"""Tokens to text as they come: nothing is said that a later token could still change.

`Detokenizer` keeps back characters that are not whole, `StopFinder` what could be the beginning of
a stop text. The pieces of a continuation are its text, whoever puts them together.
"""

import codecs
import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from colossax.data import Tokenizer

HELD_TOKENS = 32
"""Tokens that may wait for a character to be whole; after so many it is taken to be broken."""


@runtime_checkable
class Detokenizer(Protocol):
    """Turns one token after another into text."""

    def push(self, token: int) -> str:
        """What the token adds that is certain."""
        ...

    def finish(self) -> str:
        """What was kept back, broken characters as U+FFFD."""
        ...


class ByteDetokenizer:
    """For byte-level tokenizers: a token is bytes, so a decoder of UTF-8 is all. Exact, linear."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """What the token adds that is certain."""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        """What was kept back, broken characters as U+FFFD."""
        return self._decoder.decode(b"", final=True)


class ContextDetokenizer:
    """For any tokenizer: what a token adds is seen in the text of it and those before it.

    Those before it are the ones since text was last said, and as many again before them: what a
    token means may depend on what stands before it, as the space in front of a first word does.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._said = 0

    def push(self, token: int) -> str:
        """What the token adds that is certain."""
        self._tokens.append(token)
        whole = self._tokenizer.decode(self._tokens)
        if whole.endswith("\N{REPLACEMENT CHARACTER}"):
            if len(self._tokens) - self._said < HELD_TOKENS:
                return ""
        return self._new(whole)

    def finish(self) -> str:
        """What was kept back, broken characters as U+FFFD."""
        return self._new(self._tokenizer.decode(self._tokens))

    def _new(self, whole: str) -> str:
        before = self._tokenizer.decode(self._tokens[: self._said])
        self._tokens = self._tokens[self._said :]
        self._said = len(self._tokens)
        return whole[len(before) :]


def detokenizer(tokenizer: Tokenizer) -> Detokenizer:
    """The one for this tokenizer."""
    if tokenizer.is_byte_level:
        return ByteDetokenizer(tokenizer)
    return ContextDetokenizer(tokenizer)


class StopFinder:
    """Cuts text before the first stop text in it, wherever its pieces are cut."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._kept = ""
        self.found = False

    def push(self, text: str) -> str:
        """The text that is certain not to begin a stop text."""
        if self.found or not self._stops:
            return "" if self.found else text
        self._kept += text
        places = [at for stop in self._stops if (at := self._kept.find(stop)) >= 0]
        if places:
            self.found = True
            return self._taken(min(places))
        return self._taken(len(self._kept) - self._beginning())

    def finish(self) -> str:
        """What was kept back, as no more comes."""
        return self._taken(len(self._kept))

    def _taken(self, count: int) -> str:
        taken, self._kept = self._kept[:count], "" if self.found else self._kept[count:]
        return taken

    def _beginning(self) -> int:
        """Characters at the end that a stop text begins with."""
        most = min(max(map(len, self._stops)) - 1, len(self._kept))
        ends = (n for n in range(most, 0, -1) if self._begins(self._kept[-n:]))
        return next(ends, 0)

    def _begins(self, end: str) -> bool:
        return any(stop.startswith(end) for stop in self._stops)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A token as log-probabilities tell of it.

    Attributes:
        token: Its id.
        logprob: Its log-probability; None: nothing stands before it.
        top: The likeliest tokens there, with theirs.
        offset: Characters of the continuation before it.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    offset: int


class Telling:
    """Text of one continuation and the tokens that it is of, each told with the end of its text.

    Attributes:
        stopped: Whether a stop text has come; all that is said is said then.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._detokenizer, self._finder = detokenizer(tokenizer), StopFinder(stops)
        self._read = self._told = 0
        self._waiting: list[tuple[int, Entry | None]] = []

    @property
    def stopped(self) -> bool:
        """Whether a stop text has come."""
        return self._finder.found

    def push(
        self, token: int, logprob: float | None = None, top: tuple[tuple[int, float], ...] = ()
    ) -> tuple[str, tuple[Entry, ...]]:
        """The text that is certain now, and the tokens whose text is all told."""
        offset, text = self._read, self._detokenizer.push(token)
        self._read += len(text)
        if logprob is not None:
            entry = Entry(token=token, logprob=logprob, top=top, offset=offset)
            self._waiting.append((self._read, entry))
        return self._out(self._finder.push(text))

    def finish(self) -> tuple[str, tuple[Entry, ...]]:
        """What was kept back; tokens that only a stop text was of are left out."""
        rest = ""
        if not self.stopped:
            text = self._detokenizer.finish()
            self._read += len(text)
            rest = self._finder.push(text)
            rest += "" if self.stopped else self._finder.finish()
        text, entries = self._out(rest)
        last = [e for _, e in self._waiting if e is not None and not self._is_cut(e)]
        self._waiting = []
        return text, (*entries, *last)

    def _is_cut(self, entry: Entry) -> bool:
        return self.stopped and entry.offset >= self._told

    def _out(self, text: str) -> tuple[str, tuple[Entry, ...]]:
        self._told += len(text)
        # A token without text of its own is told with the next that has some.
        count = 0
        if text:
            count = sum(1 for end, _ in self._waiting if end <= self._told)
        told, self._waiting = self._waiting[:count], self._waiting[count:]
        return text, tuple(entry for _, entry in told if entry is not None)
