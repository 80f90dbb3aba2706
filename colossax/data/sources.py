"""Documents: strings in a fixed order, from files of text, JSONL or Parquet.

A document is a text file, a line of JSONL or a row of Parquet; those without a single character are
left out. Iterating again reads again; nothing is held but one file of text, one line, or one batch
of a row group.
"""

import dataclasses
import functools
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

from colossax.data.files import file_hashes, stat_of, unreadable
from colossax.data.readers import READERS, Kind, Reading
from colossax.errors import DataError

_KIND_OF_SUFFIX = {".jsonl": Kind.JSONL, ".ndjson": Kind.JSONL, ".parquet": Kind.PARQUET}
_NOT_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Documents:
    """The documents of some files, file after file.

    Attributes:
        origin: What to call them in messages.
        files: Every file with its kind, in order.
        reading: How they are read.
    """

    origin: str
    files: tuple[tuple[Path, Kind], ...]
    reading: Reading = Reading()

    def __iter__(self) -> Iterator[str]:
        """The documents.

        Raises:
            DataError: A file cannot be read or decoded, is damaged, or lacks the text field; or
                there is no document at all.
        """
        empty = True
        for file, kind in self.files:
            for text in READERS[kind](file, self.reading):
                if text:
                    empty = False
                    yield text
        if empty:
            raise DataError(f"{self.origin}: holds no text; name a file or folder with some")

    @functools.cached_property
    def size_bytes(self) -> int:
        """Bytes of the files on disk."""
        return sum(stat_of(file).st_size for file, _ in self.files)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of what the files hold and how it is read; names and times play no part.

        Cost: reads all files once; again only those whose size or times have changed.
        """
        digest = hashlib.blake2b(digest_size=16)
        reading = (self.reading.text_field, self.reading.skip_undecodable)
        digest.update(repr(reading).encode())
        hashes = file_hashes([file for file, _ in self.files])
        for (_, kind), content in zip(self.files, hashes, strict=True):
            digest.update(f"{kind}:{content};".encode())
        return digest.hexdigest()


def path_documents(
    path: str | os.PathLike[str], *, text_field: str = "text", skip_undecodable: bool = False
) -> Documents:
    """Documents of a file, or of all files below a folder in the order of their relative paths.

    `.jsonl` and `.ndjson` are read as JSONL, `.parquet` as Parquet, any other file as one document
    of text. In folders, hidden files and folders (`.git`) and links to folders are left out.

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
        reading=Reading(text_field=text_field, skip_undecodable=skip_undecodable),
    )


def stdlib_documents() -> Documents:
    """The `.py` files of the running Python's standard library, without tests and other packages.

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
    paths: list[Path] = []
    for folder, folders, files in os.walk(root, onerror=_refuse_folder):
        folders[:] = [name for name in folders if enter(name)]
        paths.extend(Path(folder, name) for name in files if enter(name))
    return sorted(paths, key=lambda file: file.relative_to(root).as_posix())


def _refuse_folder(problem: OSError) -> None:
    raise unreadable(problem.filename, problem) from problem
