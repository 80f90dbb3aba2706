"""Records of files, each with the place where it stands."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from colossax.data.files import open_bytes
from colossax.data.readers import Kind, damage_told, object_of_line, record_batches
from colossax.data.sources import Documents
from colossax.documents import parse_json
from colossax.errors import DataError

Record = tuple[str, dict[str, Any]]
"""Where it stands, for people, and its fields."""


def records_of(documents: Documents) -> Iterator[Record]:
    """Every record of JSONL, Parquet and Arrow files, and of `.json` files that are one list.

    Raises:
        DataError: A file is of another kind, damaged, or cannot be read, or holds no record.
    """
    empty = True
    for file, kind in documents.files:
        for record in _read(file, kind):
            empty = False
            yield record
    if empty:
        raise DataError(f"{documents.origin}: holds no record; name a file or folder with some")


def _read(file: Path, kind: Kind) -> Iterator[Record]:
    if kind is Kind.JSONL:
        return _lines(file)
    if kind in (Kind.PARQUET, Kind.ARROW):
        return _rows(file, kind)
    if file.suffix.lower() == ".json":
        return _list(file)
    raise DataError(
        f"{file}: conversations are read of .jsonl, .json, .parquet and .arrow files; write one"
        " object per line, and name it so"
    )


def _lines(file: Path) -> Iterator[Record]:
    with open_bytes(file) as opened:
        for number, raw in enumerate(opened, start=1):
            where = f"{file}, line {number}"
            try:
                line = raw.decode("utf-8-sig")
            except UnicodeDecodeError as problem:
                raise DataError(f"{where}: is not UTF-8 ({problem.reason}); convert it") from None
            if line and not line.isspace():
                yield where, object_of_line(line, where)


def _rows(file: Path, kind: Kind) -> Iterator[Record]:
    row = 0
    with damage_told(file, kind):
        for batch in record_batches(file, kind, lambda schema: None):
            for at in range(batch.num_rows):
                row += 1
                yield _record(batch.slice(at, 1), f"{file}, row {row}")


def _record(batch: Any, where: str) -> Record:
    """Of a batch of one row; a column that other rows have is null in it, and left out."""
    try:
        (record,) = batch.to_pylist()
    except UnicodeDecodeError as problem:
        raise DataError(f"{where}: is not UTF-8 ({problem.reason}); convert it") from None
    return where, {name: value for name, value in record.items() if value is not None}


def _list(file: Path) -> Iterator[Record]:
    with open_bytes(file) as opened:
        content = opened.read()
    try:
        found = parse_json(content, list)
    except ValueError as problem:
        raise DataError(f"{file}: {problem}; give one list of objects, or JSONL") from None
    for number, record in enumerate(found, start=1):
        if not isinstance(record, dict):
            raise DataError(f"{file}, entry {number}: is no object; give a list of objects")
        yield f"{file}, entry {number}", record
