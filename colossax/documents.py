"""JSON that others may have written, read where it is small, flat and of the kind asked.

Standard `json` alone lets through what breaks later: nesting that exhausts the stack, numbers of
thousands of digits, halves of characters, another type than the reader goes on to index.
"""

import json
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from colossax.errors import InputError

LIMIT_BYTES = 256 << 20
"""Larger documents are refused; the largest tokenizers have about 30 MB."""

LIMIT_DEPTH = 64
"""Most objects and lists within one another."""

LIMIT_INTEGER = 1 << 64
"""Integers are closer to zero."""

_HALVES = re.compile(r"\\u[dD][89a-fA-F]")
"""Halves of characters as they are written, both of a pair too."""

ANY_KIND = (dict, list, str, bool, int, float, type(None))
"""Of a value that may be anything that JSON can say."""

_KINDS = {
    dict: "an object",
    list: "a list",
    str: "a text",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    type(None): "null",
}


def read_json(
    path: Path | str,
    kind: type | tuple[type, ...] = dict,
    *,
    remedy: str,
    error: type[InputError] = InputError,
    limit_bytes: int = LIMIT_BYTES,
) -> Any:
    """The value in a JSON file.

    Args:
        path: Of a regular file.
        kind: What the value may be, as for `as_kind`.
        remedy: Ends the sentence of a refusal: what would work.
        error: What a refusal is raised as.
        limit_bytes: Largest size that is read at all.

    Raises:
        InputError: It is missing, too large, no JSON in UTF-8, too deep, or of another kind; names
            the file, the reason and the remedy.
    """
    try:
        return parse_json(read_small(path, limit_bytes), kind)
    except (OSError, ValueError) as problem:
        raise error(f"{path}: cannot be read ({why(problem)}); {remedy}") from problem


def read_small(path: Path | str, limit_bytes: int = LIMIT_BYTES) -> bytes:
    """A regular file of at most so many bytes, which is looked at before anything is read.

    Raises:
        OSError: It cannot be read.
        ValueError: It is larger, or no file; the message does not name it.
    """
    with open(path, "rb", opener=_without_waiting) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is no file")
        if found.st_size > limit_bytes:
            raise ValueError(f"it has {found.st_size} bytes, and at most {limit_bytes} are read")
        return file.read(found.st_size)


def _without_waiting(path: str, flags: int) -> int:
    """Opens a pipe that nobody writes to as well, in place of waiting for ever."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def parse_json(
    content: bytes | str, kind: type | tuple[type, ...] = dict, *, unique: bool = False
) -> Any:
    """The value of a JSON text.

    Args:
        content: The text.
        kind: What the value may be, as for `as_kind`.
        unique: Whether an object that has a name twice is refused; else the last one counts.

    Raises:
        ValueError: It is no JSON in UTF-8, too deep, has an integer of too many digits or half a
            character, or is of another kind; the message is a short reason that names no file.
    """
    try:
        text = content.decode("utf-8") if isinstance(content, bytes) else content
        pairs = _once if unique else None
        value = json.loads(text, parse_int=_integer, object_pairs_hook=pairs)
    except UnicodeDecodeError as problem:
        raise ValueError(f"it is not UTF-8 at byte {problem.start}") from problem
    except json.JSONDecodeError as problem:
        raise ValueError(f"it is no JSON: {problem}") from problem
    except RecursionError as problem:
        raise ValueError(f"it is nested deeper than {LIMIT_DEPTH}") from problem
    if text.count("[") + text.count("{") > LIMIT_DEPTH:
        _check_depth(value)
    if _HALVES.search(text):
        _check_characters(value)
    return as_kind(value, kind, "it")


def member(value: Any, name: str, kind: type | tuple[type, ...], *, of: str = "it") -> Any:
    """A member of an object.

    Raises:
        ValueError: There is none, or it is of another kind; the message names no file.
    """
    if name not in as_kind(value, dict, of):
        raise ValueError(f"{of} has no '{name}'")
    return as_kind(value[name], kind, f"'{name}'")


def as_kind(value: Any, kind: type | tuple[type, ...], what: str) -> Any:
    """The value, if it is of a kind: `dict list str bool int float`, or None's type.

    An integer is a number too; true and false are neither.

    Raises:
        ValueError: It is of another; the message says what it is and what it should be.
    """
    kinds = kind if isinstance(kind, tuple) else (kind,)
    found = type(value)
    if found in kinds or (found is int and float in kinds):
        return value
    wanted = " or ".join(_KINDS.get(one, one.__name__) for one in kinds)
    raise ValueError(f"{what} is {_KINDS.get(found, found.__name__)}, not {wanted}")


def why(problem: OSError | ValueError) -> str:
    """What is wrong with a file, in few words and without its name."""
    if isinstance(problem, OSError) and problem.strerror:
        return problem.strerror
    return str(problem)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it has '{twice[:100]}' twice in an object")
    return found


def _integer(digits: str) -> int:
    if len(digits) > 21 or abs(value := int(digits)) >= LIMIT_INTEGER:
        raise ValueError(f"it has an integer of {len(digits.lstrip('-'))} digits")
    return value


def _check_depth(value: Any) -> None:
    layer, depth = _containers([value]), 0
    while layer:
        depth += 1
        if depth > LIMIT_DEPTH:
            raise ValueError(f"it is nested deeper than {LIMIT_DEPTH}")
        layer = [x for one in layer for x in _containers(_inside(one))]


def _containers(values: Iterable[Any]) -> list[Any]:
    return [x for x in values if isinstance(x, dict | list)]


def _inside(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _check_characters(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as problem:
        raise ValueError("it has half a character, a surrogate alone") from problem
