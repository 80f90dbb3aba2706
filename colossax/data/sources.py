"""Documents: strings in a fixed order, from files of text, JSONL or Parquet.

What counts as a document is the same everywhere: a text file, a line of JSONL, a row of Parquet. Those
without a single character are left out. Iterating again reads again; nothing is held but one file
of text, one line, or one batch of a row group.
"""

import contextlib
import dataclasses
import enum
import functools
import hashlib
import io
import json
import os
import sysconfig
import time
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from colossax.config import nearest
from colossax.data.cache import cache_folder
from colossax.errors import DataError

_PARQUET_BATCH_ROWS = 1024
_RACY_S = 2.0
_NOT_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)


class Kind(enum.StrEnum):
    """How the documents lie in a file."""

    TEXT = "text"
    JSONL = "jsonl"
    PARQUET = "parquet"
    PYTHON = "python"


_KIND_OF_SUFFIX = {".jsonl": Kind.JSONL, ".ndjson": Kind.JSONL, ".parquet": Kind.PARQUET}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Documents:
    """The documents of some files, file after file.

    Attributes:
        origin: What to call them in messages.
        files: Every file with how it is read, in order.
        text_field: Field or column that holds the text of JSONL and Parquet.
        skip_undecodable: Leave out what is not UTF-8 (a text file, a line, a row) instead of
            refusing it.
    """

    origin: str
    files: tuple[tuple[Path, Kind], ...]
    text_field: str = "text"
    skip_undecodable: bool = False

    def __iter__(self) -> Iterator[str]:
        """The documents.

        Raises:
            DataError: A file cannot be read or decoded, is damaged, or lacks the text field; or
                there is no document at all.
        """
        empty = True
        for file, kind in self.files:
            for text in _READERS[kind](file, self):
                if text:
                    empty = False
                    yield text
        if empty:
            raise DataError(f"{self.origin}: holds no text; name a file or folder with some")

    @functools.cached_property
    def size_bytes(self) -> int:
        """Bytes of the files on disk."""
        return sum(_stat(file).st_size for file, _ in self.files)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of what the files hold and how it is read; names and times play no part.

        Cost: reads all files once; again only those whose size or times have changed.
        """
        digest = hashlib.blake2b(digest_size=16)
        digest.update(repr((self.text_field, self.skip_undecodable)).encode())
        hashes = _file_hashes([file for file, _ in self.files])
        for (_, kind), content in zip(self.files, hashes, strict=True):
            digest.update(f"{kind}:{content};".encode())
        return digest.hexdigest()

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


def path_documents(
    path: str | os.PathLike[str], *, text_field: str = "text", skip_undecodable: bool = False
) -> Documents:
    """Documents of a file, or of all files below a folder in the order of their relative paths.

    `.jsonl` and `.ndjson` are read as JSONL, `.parquet` as Parquet, any other file as one document of
    text. In folders, hidden files and folders (`.git`) and links to folders are left out.

    Raises:
        DataError: The path is empty, missing, no file or folder, or holds no files.
    """
    if not os.fspath(path):
        raise DataError("data path: is empty; name a file or folder of text, JSONL or Parquet")
    root = Path(path).expanduser()
    if not root.exists():
        raise DataError(f"{root}: does not exist; name a file or folder of text, JSONL or Parquet")
    files = _walk(root, lambda name: not name.startswith(".")) if root.is_dir() else [root]
    if not files:
        raise DataError(f"{root}: holds no files; name a folder of text, JSONL or Parquet files")
    for file in files:
        if not file.is_file():
            raise DataError(f"{file}: is no regular file; save what it gives to a file first")
    return Documents(
        origin=str(root),
        files=tuple((file, _KIND_OF_SUFFIX.get(file.suffix.lower(), Kind.TEXT)) for file in files),
        text_field=text_field,
        skip_undecodable=skip_undecodable,
    )


def stdlib_documents() -> Documents:
    """The `.py` files of the running Python's standard library, without tests and installed packages.

    Each is decoded as Python itself does it: by its coding line, UTF-8 without one.

    Raises:
        DataError: This Python comes without the source of its library.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    wanted = _walk(root, lambda name: name not in _NOT_LIBRARY) if root.is_dir() else []
    files = tuple((file, Kind.PYTHON) for file in wanted if file.suffix == ".py")
    origin = f"Python's standard library in {root}"
    if not files:
        raise DataError(f"{origin}: holds no source; name a path with text of your own")
    return Documents(origin=origin, files=files)


def _walk(root: Path, enter: Callable[[str], bool]) -> list[Path]:
    """Files below a folder whose name and folders all satisfy `enter`, by relative path."""
    found: list[Path] = []
    for folder, folders, files in os.walk(root, onerror=_refuse_folder):
        folders[:] = [name for name in folders if enter(name)]
        found.extend(Path(folder, name) for name in files if enter(name))
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def _refuse_folder(problem: OSError) -> None:
    raise _unreadable(problem.filename, problem) from problem


def _unreadable(file: Path | str, problem: OSError) -> DataError:
    return DataError(f"{file}: cannot be read ({problem.strerror}); check its permissions")


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[io.BufferedReader]:
    try:
        with file.open("rb") as opened:
            yield opened
    except OSError as problem:
        raise _unreadable(file, problem) from problem


def _stat(file: Path) -> os.stat_result:
    try:
        return file.stat()
    except OSError as problem:
        raise _unreadable(file, problem) from problem


def _read_text(file: Path, documents: Documents) -> Iterator[str | None]:
    with _opened(file) as opened:
        raw = opened.read()
    yield documents.decode(raw, str(file))


def _read_python(file: Path, documents: Documents) -> Iterator[str | None]:
    with _opened(file) as opened:
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


def _read_jsonl(file: Path, documents: Documents) -> Iterator[str | None]:
    with _opened(file) as opened:
        for number, raw in enumerate(opened, start=1):
            where = f"{file}, line {number}"
            line = documents.decode(raw, where)
            if line and not line.isspace():
                yield _text_of_line(line, where, documents)


def _text_of_line(line: str, where: str, documents: Documents) -> str | None:
    field = documents.text_field
    try:
        record = json.loads(line.rstrip())
    except json.JSONDecodeError as problem:
        raise DataError(
            f"{where}: is not JSON ({problem.msg} at column {problem.colno}); write one object per"
            f" line"
        ) from problem
    if not isinstance(record, dict):
        raise DataError(f"{where}: found {_json_name(record)}; write one object per line")
    if field not in record:
        raise DataError(
            f"{where}: has no field '{field}'{nearest(field, record)}; name the one that holds the"
            f" text in text_field"
        )
    text = record[field]
    if not isinstance(text, str):
        raise DataError(f"{where}: field '{field}' is {_json_name(text)}; it must hold a string")
    if "\\u" in line and not _encodable(text):
        return documents.undecodable(where, "half a surrogate pair")
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


def _read_parquet(file: Path, documents: Documents) -> Iterator[str | None]:
    import pyarrow
    import pyarrow.parquet

    field, row = documents.text_field, 0
    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            _check_column(opened.schema_arrow, field, file)
            for batch in opened.iter_batches(_PARQUET_BATCH_ROWS, columns=[field]):
                for raw in _as_bytes(batch.column(0)):
                    row += 1
                    if raw is None:
                        raise DataError(
                            f"{file}, row {row}: column '{field}' is null; it must hold a string"
                        )
                    yield documents.decode(raw, f"{file}, row {row}")
    # pyarrow reports damage as either, depending on where it meets it.
    except (pyarrow.ArrowException, OSError) as problem:
        reason = str(problem).splitlines()[0].rstrip(".")
        raise DataError(
            f"{file}: is no whole Parquet file ({reason}); copy or write it again"
        ) from problem


def _check_column(schema: Any, field: str, file: Path) -> None:
    import pyarrow

    if field not in schema.names:
        raise DataError(
            f"{file}: has no column '{field}'{nearest(field, schema.names)}; name the one that"
            f" holds the text in text_field"
        )
    found = schema.field(field).type
    held = found.value_type if pyarrow.types.is_dictionary(found) else found
    if not (pyarrow.types.is_string(held) or pyarrow.types.is_large_string(held)):
        raise DataError(f"{file}: column '{field}' holds {found}; it must hold strings")


def _as_bytes(column: Any) -> Iterator[bytes | None]:
    """Parquet promises UTF-8 and does not check it, so the bytes are taken and decoded here."""
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    for value in column.cast(pyarrow.large_binary()):
        yield value.as_py()


_READERS: dict[Kind, Callable[[Path, Documents], Iterator[str | None]]] = {
    Kind.TEXT: _read_text,
    Kind.JSONL: _read_jsonl,
    Kind.PARQUET: _read_parquet,
    Kind.PYTHON: _read_python,
}


def _file_hashes(files: Iterable[Path]) -> list[str]:
    """Content hash per file, from memory where size and times are those of the last time."""
    paths = [str(file.resolve()) for file in files]
    name = hashlib.blake2b("\0".join(paths).encode(), digest_size=16).hexdigest()
    memory = cache_folder() / "hashes" / f"{name}.json"
    known, seen = _recall(memory), {}
    for path in paths:
        stat = _stat(Path(path))
        stamp = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
        entry = known.get(path)
        seen[path] = entry if entry and entry[:3] == stamp else [*stamp, _hash_file(Path(path))]
    if seen != known:
        _remember(memory, seen)
    return [seen[path][3] for path in paths]


def _hash_file(file: Path) -> str:
    with _opened(file) as opened:
        return hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _recall(memory: Path) -> dict[str, list]:
    try:
        known = json.loads(memory.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _remember(memory: Path, seen: dict[str, list]) -> None:
    # A file changed again within the clock's tick would keep its times: recent ones stay out.
    settled_ns = time.time_ns() - int(_RACY_S * 1e9)
    old = {path: entry for path, entry in seen.items() if max(entry[1:3]) < settled_ns}
    # Without it the next run only reads the files again.
    with contextlib.suppress(OSError):
        memory.parent.mkdir(parents=True, exist_ok=True)
        part = memory.with_name(f"{memory.name}.{os.getpid()}.part")
        part.write_text(json.dumps(old))
        os.replace(part, memory)
