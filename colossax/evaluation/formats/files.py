"""Rows of files, refused by file and line."""

import csv
import io
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from colossax.config import check_text
from colossax.documents import as_kind, parse_json, read_small, why
from colossax.errors import InputError


def lines_of(file: Path, what: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Objects of a JSONL file with where they stand; empty lines are passed over.

    Args:
        file: Of one object or more.
        what: The file holds, for messages.

    Raises:
        InputError: It cannot be read, a line is no object, or there is none.
    """
    empty = True
    for number, line in enumerate(_bytes_of(file, what).split(b"\n"), 1):
        if line.strip():
            empty = False
            where = f"{file}, line {number}"
            try:
                yield where, parse_json(line, unique=True)
            except ValueError as problem:
                raise InputError(f"{where}: {problem}; give a JSON object a line") from None
    if empty:
        raise InputError(f"{file} holds no {what}; give one JSON object a line")


def rows_of(file: Path, what: str) -> Iterator[tuple[str, list[str]]]:
    """Rows of a CSV file with where they stand.

    Raises:
        InputError: It cannot be read, or is no CSV in UTF-8.
    """
    try:
        text = _bytes_of(file, what).decode("utf-8-sig")
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        for row in reader:
            if row:
                yield f"{file}, line {reader.line_num}", row
    except (UnicodeDecodeError, csv.Error) as problem:
        raise InputError(f"{file}: is no CSV in UTF-8 ({problem}); give {what} as CSV") from None


def _bytes_of(file: Path, what: str) -> bytes:
    try:
        return read_small(file)
    except (OSError, ValueError) as problem:
        raise InputError(
            f"{file}: cannot be read ({why(problem)}); give a file of {what}"
        ) from None


def field(row: dict[str, Any], name: str, kind: Any, where: str) -> Any:
    """A value of a row.

    Raises:
        InputError: It is not there, of another kind, or half a character.
    """
    if name not in row:
        found = ", ".join(sorted(row)) or "(none)"
        raise InputError(f"{where}: has the fields {found} and no {name}; give one")
    try:
        value = as_kind(row[name], kind, name)
    except ValueError as problem:
        raise InputError(f"{where}: {problem}; repair it") from None
    if isinstance(value, str):
        check_text(value, f"{where}: {name}")
    return value


def texts(values: list[Any], name: str, where: str, least: int = 1) -> tuple[str, ...]:
    """A list's texts, none empty.

    Raises:
        InputError: There are fewer than `least`, or others among them.
    """
    if len(values) < least or not all(isinstance(one, str) and one.strip() for one in values):
        count = {1: "one text", 2: "two texts"}[least]
        raise InputError(f"{where}: {name}: give {count} or more, none of them empty")
    for one in values:
        check_text(one, f"{where}: {name}")
    return tuple(values)


def examples(found: Iterable[str], count: int, where: Path) -> tuple[str, ...]:
    """The first so many; of none, nothing is read.

    Raises:
        InputError: There are fewer.
    """
    some = tuple(itertools.islice(found, count)) if count else ()
    if len(some) < count:
        raise InputError(
            f"{where}: has {len(some)} examples, and {count} are asked for; give --shots"
            f" {len(some)}"
        )
    return some


def below(folder: Path, pattern: str, what: str, *inside: str) -> list[Path]:
    """Files of a folder, or of a folder within it, by name.

    Args:
        folder: That was given.
        pattern: Of their names.
        what: They hold, for messages.
        inside: Folders within it where they may lie instead, the first that has any.

    Raises:
        InputError: There are none.
    """
    for place in (folder, *(folder / one for one in inside)):
        if found := sorted(place.glob(pattern)):
            return found
    raise InputError(f"{folder}: holds no {pattern}; name the folder of {what}")
