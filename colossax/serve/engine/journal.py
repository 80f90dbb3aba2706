"""What is under way, on disk: what each request asked, and what it has been told."""

import json
import os
from pathlib import Path
from typing import Any

MODE = 0o600
"""It holds what people asked."""


class Journal:
    """Lines of JSON in a file that only its owner reads: emptied when nothing is under way.

    An engine that dies is told of its requests from memory; the file is there for whoever looks
    after a server that died itself. Writing never fails a request that has begun.
    """

    def __init__(self, path: Path):
        """Begin anew.

        Args:
            path: What is there already is of an earlier server: `left` of its requests had not
                ended.

        Raises:
            OSError: It cannot be written.
        """
        self.path, self.left = path, unfinished(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND
        self._file = os.open(path, flags, MODE)
        self._under_way: set[int] = set()

    def begin(self, number: int, request: dict[str, Any]) -> None:
        """A request is taken.

        Raises:
            OSError: It cannot be written, as where a disk is full.
        """
        self._write({"begin": number, "request": request})
        self._under_way.add(number)

    def told(self, said: dict[int, list[int]], ended: list[int]) -> None:
        """Tokens that requests were told, and those that ended."""
        try:
            self._write({"said": said, "ended": ended})
            self._under_way.difference_update(ended)
            if not self._under_way:
                os.ftruncate(self._file, 0)
        except OSError:
            self._under_way.difference_update(ended)

    def close(self) -> None:
        """Remove it: nothing is under way."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
        self.path.unlink(missing_ok=True)

    def _write(self, line: dict[str, Any]) -> None:
        body = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        written = os.write(self._file, body)
        if written < len(body):  # a disk that is full takes a part
            os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise OSError("the disk is full")


def unfinished(path: Path) -> int:
    """Requests of a journal that had not ended; lines that are broken are passed over."""
    under_way: set[int] = set()
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return 0
    for line in lines:
        try:
            found = json.loads(line)
            if "begin" in found:
                under_way.add(found["begin"])
            under_way.difference_update(found.get("ended", ()))
        except (ValueError, TypeError, AttributeError):
            continue
    return len(under_way)
