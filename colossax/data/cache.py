"""How an entry of the cache folder appears: whole or not at all, and known again."""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from colossax.documents import member, parse_json
from colossax.errors import DataError


def built_once(
    path: Path, build: Callable[[Path], object], *, intact: Callable[[Path], bool]
) -> Path:
    """The cache entry at `path`, built first when it is missing or damaged.

    Processes that share the folder wait for the one that builds. It writes beside `path` and
    renames at the end, so that one killed half-way leaves nothing that could be taken for an entry;
    the next builder removes what it left.

    Args:
        path: File or folder of the entry.
        build: Writes the entry at the path it is given, which does not exist yet.
        intact: Whether what stands at a path is a whole entry.

    Raises:
        DataError: The folder cannot be written: no space, no permission, no file locks.
    """
    if intact(path):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_name(f"{path.name}.lock")):
            if not intact(path):
                _build(path, build)
    except OSError as problem:
        raise DataError(
            f"cache folder {path.parent}: cannot be written ({problem.strerror}); make room there"
            f" or name another folder in COLOSSAX_CACHE"
        ) from problem
    return path


def sealed(body: str, owner: str) -> str:
    """A JSON document that holds a text and a checksum of it and of the entry it belongs to."""
    return json.dumps({"checksum": _seal(body, owner), "body": body})


def unsealed(document: str, owner: str) -> str:
    """The text that `sealed` wrote for this owner.

    Raises:
        ValueError: It was altered, or belongs to another entry.
    """
    outer = parse_json(document)
    body = member(outer, "body", str)
    if outer.get("checksum") != _seal(body, owner):
        raise ValueError("its checksum is not that of its text and its owner")
    return body


def _seal(body: str, owner: str) -> str:
    return hashlib.blake2b(f"{owner}\0{body}".encode(), digest_size=16).hexdigest()


def _build(path: Path, build: Callable[[Path], object]) -> None:
    part = path.with_name(f"{path.name}.part")
    _remove(part)
    try:
        build(part)
        for file in part.iterdir() if part.is_dir() else (part,):
            _flush(file)
        _remove(path)
        os.replace(part, path)
    finally:
        _remove(part)


def _flush(file: Path) -> None:
    # A rename may reach the disk before the bytes do.
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    # For reading too: so a pipe in its place is not waited for.
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
