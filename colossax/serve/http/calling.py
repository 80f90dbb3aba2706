"""Calls of functions in what a model says: found in its text, and told apart from it."""

import dataclasses
import json
import re
import secrets
import string
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from colossax.serve.http.tools import Tools

MOST_BLANKS = 256
"""More of them are told though a call might follow, before which they would not be."""

LETTERS = string.ascii_letters + string.digits


class CallPart(NamedTuple):
    """A part of a call.

    Attributes:
        index: Which call of the answer.
        id: Its, with its first part; None with others.
        name: Of the function, likewise.
        arguments: What this adds to its arguments in JSON.
    """

    index: int
    id: str | None
    name: str | None
    arguments: str


@runtime_checkable
class CallFinder(Protocol):
    """Tells text and calls apart as they come."""

    @property
    def any(self) -> bool:
        """Whether a whole call has come."""
        ...

    def push(self, text: str) -> tuple[str, tuple[CallPart, ...]]:
        """The text and the parts of calls that are certain now."""
        ...

    def finish(self) -> tuple[str, tuple[CallPart, ...]]:
        """What was kept back, as no more comes."""
        ...


class Markup(NamedTuple):
    """How a family of models writes calls into its text.

    Attributes:
        begin: Characters that begin calls.
        end: Those that end one; empty: calls go to the end of the text.
        bare: Whether a text that begins with `{` is a call too.
        short_ids: Whether templates take ids of nine letters alone.
    """

    begin: str
    end: str = ""
    bare: bool = False
    short_ids: bool = False

    def id(self) -> str:
        """Of a new call."""
        if self.short_ids:
            return "".join(secrets.choice(LETTERS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


TAGGED = Markup("<tool_call>", "</tool_call>")
"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

MISTRAL = Markup("[TOOL_CALLS]", short_ids=True)
"""`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`; its template takes ids of nine letters."""

LLAMA = Markup("<|python_tag|>", bare=True)
"""Llama 3.1: `{"name": ..., "parameters": {...}}`."""

OTHER = Markup("")
"""Of a model whose way is not known: what it says is text, but where a call is enforced."""


def markup_of(template: str) -> Markup:
    """How a model writes calls, by what its chat template has."""
    if TAGGED.begin in template:
        return TAGGED
    if MISTRAL.begin in template:
        return MISTRAL
    if LLAMA.begin in template or '"parameters": ' in template:
        return LLAMA
    return OTHER


def finder_of(tools: Tools, template: str) -> CallFinder | None:
    """What finds calls in a continuation; None where there can be none.

    Args:
        tools: That may be called.
        template: Of the model's chats.
    """
    markup = markup_of(template)
    if tools.enforced is not None:
        return EnforcedCall(markup)
    if not tools.given or not markup.begin:
        return None
    return FreeCalls(markup, tools.names, several=tools.several)


_BLANKS = re.compile(r"\s+")
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*')


class EnforcedCall:
    """Of a text that a grammar makes one call: its arguments are told as they come."""

    def __init__(self, markup: Markup) -> None:
        self._id = markup.id()
        self._kept, self._began = "", False
        self._depth, self._quoted, self._escaped = 0, False, False

    @property
    def any(self) -> bool:
        """See `CallFinder`."""
        return self._depth < 0

    def push(self, text: str) -> tuple[str, tuple[CallPart, ...]]:
        """See `CallFinder`."""
        if self._began:
            return "", self._part(self._own(text))
        self._kept = _BLANKS.sub(" ", self._kept + text)  # a grammar lets any number of them stand
        head = _HEAD.match(self._kept)
        if head is None or head.end() == len(self._kept):
            return "", ()
        self._began = True
        name = json.loads(head[1])
        begun = CallPart(0, self._id, name, "")
        return "", (begun, *self._part(self._own(self._kept[head.end() :])))

    def finish(self) -> tuple[str, tuple[CallPart, ...]]:
        """See `CallFinder`: what was cut before a call's arguments began is told to nobody."""
        return "", ()

    def _part(self, arguments: str) -> tuple[CallPart, ...]:
        return (CallPart(0, None, None, arguments),) if arguments else ()

    def _own(self, text: str) -> str:
        """Of a text what belongs to the arguments: all up to the brace that closes them."""
        for at, letter in enumerate(text):
            if self._depth < 0:
                return text[:at]
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = letter == "\\", letter != '"'
            elif letter == '"':
                self._quoted = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._depth = -1
        return text


@dataclasses.dataclass
class FreeCalls:
    """Of a text in which a model may call: what is no call of a known function stays text.

    Where there may not be `several`, what comes behind the first call is not told.
    """

    markup: Markup
    names: Sequence[str]
    several: bool = True
    count: int = 0
    kept: str = ""
    said: bool = False
    within: list[str] | None = None
    """Of a call that has begun and is not whole, what came behind `kept`."""

    @property
    def any(self) -> bool:
        """See `CallFinder`."""
        return self.count > 0

    def push(self, text: str) -> tuple[str, tuple[CallPart, ...]]:
        """See `CallFinder`."""
        if self._over or self._goes_on(text):
            return "", ()
        self.kept, self.within = "".join((self.kept, *(self.within or ()), text)), None
        told, parts = "", []
        while not self._over and (found := self._next()) is not None:
            before, block, calls = found
            if calls is None:
                told += before + block
            else:
                told += before.rstrip()
                parts += self._told(calls)
        if self._over:
            self.kept = ""
        certain = len(self.kept) - self._unsure()
        told, self.kept = told + self.kept[:certain], self.kept[certain:]
        self.said = self.said or bool(told.strip())
        self.within = None if self._begins(self.kept) is None else []
        return told, tuple(parts)

    def finish(self) -> tuple[str, tuple[CallPart, ...]]:
        """See `CallFinder`."""
        rest, self.kept, self.within = "".join((self.kept, *(self.within or ()))), "", None
        at = self._begins(rest)
        if at is not None and not self.markup.end:
            calls = _calls(rest[at:].removeprefix(self.markup.begin), self.names)
            if calls is not None:
                return rest[:at].rstrip(), tuple(self._told(calls))
        return rest if rest.strip() or not self.count else "", ()

    @property
    def _over(self) -> bool:
        return self.count > 0 and not self.several

    def _goes_on(self, text: str) -> bool:
        """Whether this only makes a call longer; it is put aside then, and not looked at again."""
        end = self.markup.end
        if self.within is None:
            return False
        if end:
            last = "".join((self.kept[-len(end) :], *self.within[-len(end) :]))
            if end in last[-len(end) :] + text:
                return False
        if text:
            self.within.append(text)
        return True

    def _next(self) -> tuple[str, str, list[tuple[str, str]] | None] | None:
        """The next whole block between tags: text before it, itself, and the calls in it."""
        begin, end = self.markup.begin, self.markup.end
        at = self.kept.find(begin) if end else -1
        stop = self.kept.find(end, at + len(begin)) if at >= 0 else -1
        if stop < 0:
            return None
        before, block = self.kept[:at], self.kept[at : stop + len(end)]
        self.kept = self.kept[stop + len(end) :]
        return before, block, _calls(block[len(begin) : -len(end)], self.names)

    def _begins(self, text: str) -> int | None:
        """Where calls begin, as far as one can see."""
        at = text.find(self.markup.begin) if self.markup.begin else -1
        if at < 0 and self.markup.bare and not self.said and text.lstrip().startswith("{"):
            at = len(text) - len(text.lstrip())
        return None if at < 0 else at

    def _unsure(self) -> int:
        """Characters at the end that may turn out to be of a call, or nothing before one."""
        at = self._begins(self.kept)
        if at is not None:
            return len(self.kept) - len(self.kept[:at].rstrip())
        begin = self.markup.begin
        ends = range(min(len(begin) - 1, len(self.kept)), 0, -1)
        at = len(self.kept) - next((n for n in ends if self.kept.endswith(begin[:n])), 0)
        blanks = at - len(self.kept[:at].rstrip())
        return len(self.kept) - at + (blanks if blanks <= MOST_BLANKS else 0)

    def _told(self, calls: Sequence[tuple[str, str]]) -> Iterator[CallPart]:
        for name, arguments in calls if self.several else calls[:1]:
            yield CallPart(self.count, self.markup.id(), name, "")
            yield CallPart(self.count, None, None, arguments)
            self.count += 1


def _calls(block: str, names: Sequence[str]) -> list[tuple[str, str]] | None:
    """Names and arguments of the calls that a text is; None: it is something else."""
    decoder, at, values = json.JSONDecoder(), 0, []
    try:
        while at < len(block):
            if block[at] in " \t\r\n;":
                at += 1
                continue
            value, at = decoder.raw_decode(block, at)
            values += value if isinstance(value, list) else [value]
        found = [_call(value, names) for value in values]
    except (ValueError, RecursionError):  # numbers that are none and halves of characters, too
        return None
    calls = [one for one in found if one is not None]
    return calls if found and len(calls) == len(found) else None


def _call(value: Any, names: Sequence[str]) -> tuple[str, str] | None:
    if not isinstance(value, dict) or value.get("name") not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    told = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    told.encode()
    return value["name"], told
