"""The documents of one file: text, JSONL, Parquet, Arrow or Python source."""

import contextlib
import dataclasses
import enum
import io
import json
import tokenize
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

from colossax.config import nearest
from colossax.data.files import open_bytes
from colossax.errors import DataError

_PARQUET_BATCH_ROWS = 1024
_ARROW_FILE = b"ARROW1"


class Kind(enum.StrEnum):
    """How the documents lie in a file."""

    TEXT = "text"
    JSONL = "jsonl"
    PARQUET = "parquet"
    ARROW = "arrow"
    PYTHON = "python"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """How files are read.

    Attributes:
        text_field: Field or column that holds the text of JSONL, Parquet and Arrow.
        skip_undecodable: Leave out what is not UTF-8 (a text file, a line, a row) instead of
            refusing it.
    """

    text_field: str = "text"
    skip_undecodable: bool = False

    def decode(self, raw: bytes, where: str) -> str | None:
        """UTF-8 bytes as text without a byte order mark; None for what is to be left out."""
        try:
            return raw.decode("utf-8-sig")
        except UnicodeDecodeError as problem:
            return self.undecodable(where, f"byte {problem.start} is 0x{raw[problem.start]:02x}")

    def undecodable(self, where: str, why: str) -> None:
        """Refuse what is not UTF-8 unless it is to be left out."""
        if not self.skip_undecodable:
            raise DataError(
                f"{where}: is not UTF-8 ({why}); convert it, or set skip_undecodable to leave such"
                f" documents out"
            )


def _read_text(file: Path, reading: Reading) -> Iterator[str | None]:
    with open_bytes(file) as opened:
        raw = opened.read()
    yield reading.decode(raw, str(file))


def _read_python(file: Path, reading: Reading) -> Iterator[str | None]:
    with open_bytes(file) as opened:
        raw = opened.read()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        text = raw.decode(encoding)
    except (SyntaxError, UnicodeDecodeError) as problem:
        raise DataError(
            f"{file}: cannot be decoded as Python source ({problem}); repair this installation of"
            f" Python or name a path with text of your own"
        ) from problem
    yield text


def _read_jsonl(file: Path, reading: Reading) -> Iterator[str | None]:
    with open_bytes(file) as opened:
        for number, raw in enumerate(opened, start=1):
            where = f"{file}, line {number}"
            line = reading.decode(raw, where)
            if line and not line.isspace():
                yield _text_of_line(line, where, reading)


def object_of_line(line: str, where: str) -> dict[str, Any]:
    """The object that a line of JSONL holds.

    Raises:
        DataError: It holds none.
    """
    try:
        record = json.loads(line.rstrip())
    except json.JSONDecodeError as problem:
        raise DataError(
            f"{where}: is not JSON ({problem.msg} at column {problem.colno}); write one object per"
            f" line"
        ) from problem
    except (ValueError, RecursionError) as problem:
        raise DataError(
            f"{where}: has a number of too many digits, or is nested too deep; write one object per"
            " line"
        ) from problem
    if not isinstance(record, dict):
        raise DataError(f"{where}: found {_json_name(record)}; write one object per line")
    return record


def _text_of_line(line: str, where: str, reading: Reading) -> str | None:
    field = reading.text_field
    record = object_of_line(line, where)
    if field not in record:
        raise DataError(
            f"{where}: has no field '{field}'{nearest(field, record)}; name the one that holds the"
            f" text in text_field"
        )
    text = record[field]
    if not isinstance(text, str):
        raise DataError(f"{where}: field '{field}' is {_json_name(text)}; it must hold a string")
    if "\\u" in line and not _encodable(text):
        return reading.undecodable(where, "half a surrogate pair")
    return text


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _json_name(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a truth value"}
    return "null" if value is None else names.get(type(value), "a number")


def _read_parquet(file: Path, reading: Reading) -> Iterator[str | None]:
    return _read_columns(file, reading, Kind.PARQUET)


def _read_arrow(file: Path, reading: Reading) -> Iterator[str | None]:
    return _read_columns(file, reading, Kind.ARROW)


def record_batches(file: Path, kind: Kind, check: Callable[[Any], object]) -> Iterator[Any]:
    """Arrow's batches of rows of a Parquet or Arrow file.

    Args:
        file: IPC as a stream, which Hugging Face's `datasets` writes, or as a file (Feather); or
            Parquet.
        kind: Which of the two.
        check: Told the schema first; of Parquet it may give columns, which are read alone.

    Raises:
        DataError: The file cannot be read. Of damage see `damage_told`.
    """
    with open_bytes(file):
        pass  # what the system does not let us read is not damaged
    yield from (_parquet if kind is Kind.PARQUET else _arrow)(file, check)


@contextlib.contextmanager
def damage_told(file: Path, kind: Kind) -> Generator[None]:
    """What pyarrow raises inside, as it meets damage, is told of the file.

    Raises:
        DataError: That.
    """
    import pyarrow

    try:
        yield
    # pyarrow reports damage as either, depending on where it meets it.
    except (pyarrow.ArrowException, OSError) as problem:
        reason = str(problem).partition("\n")[0].rstrip(".")
        raise DataError(
            f"{file}: is no whole {kind.capitalize()} file ({reason}); copy or write it again"
        ) from problem


def _parquet(file: Path, check: Callable[[Any], Any]) -> Iterator[Any]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file) as opened:
        columns = check(opened.schema_arrow)
        yield from opened.iter_batches(_PARQUET_BATCH_ROWS, columns=columns)


def _arrow(file: Path, check: Callable[[Any], object]) -> Iterator[Any]:
    import pyarrow.ipc

    with pyarrow.memory_map(str(file)) as opened:
        as_file = opened.read(len(_ARROW_FILE)) == _ARROW_FILE
        opened.seek(0)
        if as_file:
            whole = pyarrow.ipc.open_file(opened)
            batches = map(whole.get_batch, range(whole.num_record_batches))
        else:
            batches = whole = pyarrow.ipc.open_stream(opened)
        check(whole.schema)
        yield from batches


def _read_columns(file: Path, reading: Reading, kind: Kind) -> Iterator[str | None]:
    def check(schema: Any) -> list[str]:
        _check_column(schema, reading.text_field, file)
        return [reading.text_field]

    row = 0
    with damage_told(file, kind):
        for batch in record_batches(file, kind, check):
            for raw in _as_bytes(batch.column(reading.text_field)):
                row += 1
                if raw is None:
                    raise DataError(
                        f"{file}, row {row}: column '{reading.text_field}' is null; it must hold a"
                        " string"
                    )
                yield reading.decode(raw, f"{file}, row {row}")


def _check_column(schema: Any, field: str, file: Path) -> None:
    import pyarrow

    if field not in schema.names:
        raise DataError(
            f"{file}: has no column '{field}'{nearest(field, schema.names)}; name the one that"
            f" holds the text in text_field"
        )
    column_type = schema.field(field).type
    value_type = column_type.value_type if pyarrow.types.is_dictionary(column_type) else column_type
    if not (pyarrow.types.is_string(value_type) or pyarrow.types.is_large_string(value_type)):
        raise DataError(f"{file}: column '{field}' holds {column_type}; it must hold strings")


def _as_bytes(column: Any) -> Iterator[bytes | None]:
    """Arrow promises UTF-8 and does not check it, so the bytes are taken and decoded here."""
    import pyarrow

    for value in column.cast(pyarrow.large_binary()):
        yield value.as_py()


READERS: dict[Kind, Callable[[Path, Reading], Iterator[str | None]]] = {
    Kind.TEXT: _read_text,
    Kind.JSONL: _read_jsonl,
    Kind.PARQUET: _read_parquet,
    Kind.ARROW: _read_arrow,
    Kind.PYTHON: _read_python,
}
"""How each kind is read: documents in order, None or `""` where one is left out."""
