"""What is under way, on disk: what each request asked, and what it has been told."""

import json
import os
from pathlib import Path
from typing import Any

from colossax.errors import InputError

MODE = 0o600
"""It holds what people asked."""

MOST_BYTES = 64 << 20
"""Beyond that it is written anew, without what has ended."""

_FIRST = (b'{"begin"', b'{"said"')


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
            InputError: It is there and no journal.
            OSError: It cannot be written.
        """
        self.path, self.left = path, unfinished(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        self._file = _made(path)
        self._under_way: dict[int, tuple[dict[str, Any], list[int]]] = {}
        self._bytes = 0

    def begin(self, number: int, request: dict[str, Any]) -> None:
        """A request is taken.

        Raises:
            OSError: It cannot be written, as where a disk is full.
        """
        self._write({"begin": number, "request": request})
        self._under_way[number] = request, []

    def told(self, said: dict[int, list[int]], ended: list[int]) -> None:
        """Tokens that requests were told, and those that ended."""
        for number, tokens in said.items():
            if number in self._under_way:
                self._under_way[number][1].extend(tokens)
        for number in ended:
            self._under_way.pop(number, None)
        try:
            self._write({"said": said, "ended": ended})
            if not self._under_way:
                os.ftruncate(self._file, 0)
                self._bytes = 0
            elif self._bytes > MOST_BYTES:
                self._write_anew()
        except OSError:
            return

    def _write_anew(self) -> None:
        """What is under way alone: nothing of what has ended."""
        beside, before = self.path.with_name(f"{self.path.name}.new"), self._file
        beside.unlink(missing_ok=True)
        self._file, self._bytes = _made(beside), 0
        for number, (request, tokens) in self._under_way.items():
            self._write({"begin": number, "request": request})
            self._write({"said": {number: tokens}, "ended": []})
        os.replace(beside, self.path)
        os.close(before)

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
        self._bytes += written


def _made(path: Path) -> int:
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, MODE)


def unfinished(path: Path) -> int:
    """Requests of a journal that had not ended; lines that are broken are passed over.

    Raises:
        InputError: The file is no journal.
    """
    under_way: set[int] = set()
    try:
        with path.open("rb") as lines:
            for i, line in enumerate(lines):
                if i == 0 and not line.startswith(_FIRST):
                    raise InputError(
                        f"--journal: {path} holds something else, which it would take the place of;"
                        " give another file"
                    )
                try:
                    found = json.loads(line)
                    if "begin" in found:
                        under_way.add(found["begin"])
                    under_way.difference_update(found.get("ended", ()))
                except (ValueError, TypeError, AttributeError):
                    continue
    except FileNotFoundError:
        return 0
    return len(under_way)
