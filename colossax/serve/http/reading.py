"""Readers of single values of a body: each returns what it understood, or refuses by name."""

import json
from collections.abc import Callable, Collection
from typing import Any

from colossax.config import Bound, nearest
from colossax.documents import as_kind
from colossax.serve.http.errors import Refusal, bad

Reader = Callable[[Any, str], Any]
"""Of a value and the name of its field."""


def kind_of(value: Any, kind: type | tuple[type, ...], name: str, remedy: str) -> Any:
    """The value, if it is of this kind.

    Raises:
        Refusal: 400, it is of another.
    """
    try:
        return as_kind(value, kind, name)
    except ValueError as problem:
        raise bad(f"{problem}; give {remedy}", name) from None


def text(longest: int) -> Reader:
    """Text that is not empty."""

    def read(value: Any, name: str) -> str:
        found = kind_of(value, str, name, "a text")
        if not 0 < len(found) <= longest:
            raise bad(f"{name}: has {len(found)} characters; give 1 to {longest}", name)
        return found

    return read


def flag(value: Any, name: str) -> bool:
    """True or false."""
    return kind_of(value, bool, name, "true or false")


def number(bound: Bound, *, whole: bool = False) -> Reader:
    """A number within bounds."""

    def read(value: Any, name: str) -> Any:
        found = kind_of(value, int if whole else float, name, str(bound))
        if not whole and isinstance(found, int):
            found = float(found)
        if (refusal := bound.refusal(found)) is not None:
            raise bad(f"{name}: {refusal}", name)
        return found

    return read


def refused(why: str) -> Reader:
    """A field that is known, and not honoured."""

    def read(value: Any, name: str) -> Any:
        raise bad(f"{name}: {why}", name, "unsupported_parameter")

    return read


def texts(most: int, longest: int) -> Reader:
    """One text or a list of some, none of them empty."""
    one = text(longest)

    def read(value: Any, name: str) -> tuple[str, ...]:
        if isinstance(value, str):
            return (one(value, name),)
        found = kind_of(value, list, name, f"a text or a list of at most {most}")
        if not 0 < len(found) <= most:
            raise bad(f"{name}: has {len(found)} texts; give 1 to {most}", name)
        return tuple(one(item, f"{name}[{i}]") for i, item in enumerate(found))

    return read


def members(
    value: Any, name: str, readers: dict[str, Reader], needed: Collection[str] = ()
) -> dict[str, Any]:
    """The members of an object that are not null, each read by its reader.

    Args:
        value: The object.
        name: Its name, which stands before those of its members; may be empty.
        readers: Of all members that it may have.
        needed: Those that it must have.

    Raises:
        Refusal: 400, it has others, or lacks one that is needed.
    """
    found = kind_of(value, dict, name or "the body", "an object")
    read = {}
    for key, member in found.items():
        where = f"{name}.{key}" if name else key
        if key not in readers:
            raise bad(_unknown(where, key, readers), where[:200], "unknown_parameter")
        if member is not None:
            read[key] = _inside(readers[key], member, where)
    for key in needed:
        if key not in read:
            where = f"{name}.{key}" if name else key
            raise bad(f"{where}: is missing; give it", where, "missing_required_parameter")
    return read


def _unknown(where: str, key: str, readers: dict[str, Reader]) -> str:
    return f"{where[:200]}: is not supported here{nearest(key[:200], readers)}"


def _inside(reader: Reader, value: Any, where: str) -> Any:
    try:
        return reader(value, where)
    except Refusal as refusal:
        # A member of a member names itself; what clients look for is the field they gave.
        refusal.param = refusal.param or where
        raise


def anything(value: Any, name: str) -> Any:
    """Whatever it is."""
    return value


def any_text(value: Any, name: str) -> str:
    """A text of any length."""
    return kind_of(value, str, name, "a text")


def json_text(value: Any, name: str) -> str:
    """A value as JSON.

    Raises:
        Refusal: 400, a number in it is not finite.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise bad(f"{name}: has a number that is not finite; repair it", name) from None
