"""Opening and hashing files, refusals included."""

import contextlib
import hashlib
import io
import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from colossax.config import cache_folder
from colossax.data.cache import sealed, unsealed
from colossax.documents import parse_json, read_small
from colossax.errors import DataError
from colossax.files import write_whole

_RACY_S = 2.0
_HASH_BYTES = 16


def unreadable(file: Path | str, problem: OSError) -> DataError:
    """The refusal of a file or folder that the system does not let us read."""
    return DataError(f"{file}: cannot be read ({problem.strerror}); check its permissions")


@contextlib.contextmanager
def open_bytes(file: Path) -> Iterator[io.BufferedReader]:
    """A file opened for reading bytes; failures to open and to read it are DataErrors."""
    try:
        with file.open("rb") as opened:
            yield opened
    except OSError as problem:
        raise unreadable(file, problem) from problem


def stat_of(file: Path) -> os.stat_result:
    """Size and times of a file; a failure is a DataError."""
    try:
        return file.stat()
    except OSError as problem:
        raise unreadable(file, problem) from problem


def file_hashes(files: Iterable[Path]) -> list[str]:
    """Content hash per file, from the cache where size and times are those of the last time."""
    paths = [str(file.resolve()) for file in files]
    name = hashlib.blake2b(os.fsencode("\0".join(paths)), digest_size=16).hexdigest()
    memory = cache_folder() / "hashes" / f"{name}.json"
    known, seen = _recall(memory, name), {}
    for path in paths:
        stat = stat_of(Path(path))
        stamp = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
        entry = known.get(path)
        seen[path] = entry if entry and entry[:3] == stamp else [*stamp, _hash_file(Path(path))]
    if seen != known:
        _remember(memory, name, seen)
    return [seen[path][3] for path in paths]


def _hash_file(file: Path) -> str:
    with open_bytes(file) as opened:
        return hashlib.file_digest(
            opened, lambda: hashlib.blake2b(digest_size=_HASH_BYTES)
        ).hexdigest()


def _recall(memory: Path, owner: str) -> dict[str, list]:
    try:
        known = parse_json(unsealed(read_small(memory).decode(), owner))
    except (OSError, ValueError):
        return {}
    return {path: entry for path, entry in known.items() if _is_entry(entry)}


def _is_entry(entry: Any) -> bool:
    kinds = [type(item) for item in entry] if isinstance(entry, list) else []
    return kinds == [int, int, int, str] and len(entry[3]) == 2 * _HASH_BYTES


def _remember(memory: Path, owner: str, seen: dict[str, list]) -> None:
    # A file changed again within the clock's tick would keep its times: recent ones stay out.
    settled_ns = time.time_ns() - int(_RACY_S * 1e9)
    old = {path: entry for path, entry in seen.items() if max(entry[1:3]) < settled_ns}
    # Without it the next run only reads the files again.
    with contextlib.suppress(OSError):
        write_whole(memory, sealed(json.dumps(old), owner))
