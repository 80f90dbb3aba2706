"""Documents: strings in a fixed order, from files of text, JSONL, Parquet or Arrow.

A document is a text file, a line of JSONL, a row of Parquet or Arrow; those without a single
character are left out. Iterating again reads again; nothing is held but one file of text, one line,
or one batch of rows.
"""

import dataclasses
import functools
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from colossax.config import user_path
from colossax.data.files import file_hashes, stat_of, unreadable
from colossax.data.readers import READERS, Kind, Reading
from colossax.documents import member, parse_json, read_small
from colossax.errors import DataError, InputError

_KIND_OF_SUFFIX = {
    ".jsonl": Kind.JSONL,
    ".ndjson": Kind.JSONL,
    ".parquet": Kind.PARQUET,
    ".arrow": Kind.ARROW,
}
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


def joined(each: Sequence[Documents]) -> Documents:
    """The documents of several sources as one, source after source; all are read alike."""
    return Documents(
        origin=" and ".join(documents.origin for documents in each),
        files=tuple(file for documents in each for file in documents.files),
        reading=each[0].reading,
    )


def path_documents(
    path: str | os.PathLike[str], *, text_field: str = "text", skip_undecodable: bool = False
) -> Documents:
    """Documents of a file, or of all files below a folder in the order of their relative paths.

    `.jsonl` and `.ndjson` are read as JSONL, `.parquet` as Parquet, `.arrow` as Arrow, any other
    file as one document of text. In folders, hidden files and folders (`.git`) and links to folders
    are left out. Of a folder that Hugging Face's `datasets` saved, the files of the data set are
    read in its order; where it has several splits, those of `train`.

    Raises:
        DataError: The path is empty, missing, no file or folder, or holds no files.
    """
    if not os.fspath(path):
        raise DataError(
            "data path: is empty; name a file or folder of text, JSONL, Parquet or Arrow"
        )
    try:
        root = user_path(path, "data path", utf8=False)
    except InputError as problem:
        raise DataError(str(problem)) from None
    if not root.exists():
        raise DataError(f"{root}: does not exist; name a file or folder with text")
    files = _below(root) if root.is_dir() else [root]
    if not files:
        raise DataError(
            f"{root}: holds no files; name a folder of text, JSONL, Parquet or Arrow files"
        )
    for file in files:
        if not file.is_file():
            raise DataError(f"{file}: is no regular file; save what it gives to a file first")
    return Documents(
        origin=str(root),
        files=tuple((file, _KIND_OF_SUFFIX.get(file.suffix.lower(), Kind.TEXT)) for file in files),
        reading=Reading(text_field=text_field, skip_undecodable=skip_undecodable),
    )


def _below(root: Path) -> list[Path]:
    if (splits := root / "dataset_dict.json").exists():
        names = _saved(splits, "splits")
        if "train" not in names:
            raise DataError(f"{root}: has the splits {names} and no 'train'; name one's folder")
        root = root / "train"
    if (state := root / "state.json").exists() and (root / "dataset_info.json").exists():
        return [root / _file_name(entry, state) for entry in _saved(state, "_data_files")]
    return _walk(root, lambda name: not name.startswith("."))


def _file_name(entry: Any, state: Path) -> str:
    """The name of a data set's file, which lies beside what names it."""
    name = entry.get("filename") if isinstance(entry, dict) else None
    if not isinstance(name, str) or Path(name).name != name or name in ("", "..", "."):
        raise DataError(
            f"{state}: names {name!r}, which is no file of its own folder; save the data set again"
        )
    return name


def _saved(file: Path, field: str) -> list[Any]:
    """A list in one of the JSON files that `datasets` writes beside its data."""
    try:
        return member(parse_json(read_small(file)), field, list)
    except OSError as problem:
        raise unreadable(file, problem) from problem
    except ValueError as problem:
        raise DataError(
            f"{file}: has no list '{field}', as data sets saved to disk do; save it again"
        ) from problem


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
