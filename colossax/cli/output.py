"""Standard output that holds what a verb writes and nothing else."""

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator
from typing import TextIO


class _Closed(io.TextIOBase):
    """In the place of a standard stream that was closed before the process began."""

    def write(self, text: str, /) -> int:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))


def hold_streams() -> None:
    """Have the numbers of standard streams taken, and an object in the place of each.

    A file that is opened later would get the number of one that is closed, and what libraries
    print would go into it.
    """
    with contextlib.suppress(OSError):
        while (file := os.open(os.devnull, os.O_RDWR)) <= 2:
            continue
        os.close(file)
    sys.stdout = sys.stdout or _Closed()
    sys.stderr = sys.stderr or _Closed()


def let_streams_go() -> None:
    """Drop what standard streams hold that nobody reads: Python fails over it when it ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream.fileno())
                os.close(null)


class OutputLost(Exception):
    """Standard output takes no more; the message says why, and is empty of a reader that left."""


def put(text: str) -> None:
    """Write to standard output.

    Raises:
        OutputLost: It cannot be written.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError as problem:
        raise OutputLost from problem
    except (OSError, ValueError) as problem:
        raise OutputLost(getattr(problem, "strerror", None) or str(problem)) from problem


def tell(text: str) -> None:
    """Write to standard error, as long as there is somebody to read it."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()


@contextlib.contextmanager
def standard_output(*, protected: bool) -> Iterator[TextIO]:
    """Standard output; when protected, what libraries write there goes to standard error.

    XLA's collectives between CPU processes print a line for each peer from C++.
    """
    if not protected:
        yield sys.stdout
        return
    let_streams_go()
    kept = os.dup(1)
    os.dup2(2, 1)
    out = os.fdopen(os.dup(kept), "w", encoding="utf-8")
    try:
        yield out
    finally:
        with contextlib.suppress(OSError):  # of a reader that is gone
            out.close()
        os.dup2(kept, 1)
        os.close(kept)
