"""Standard output that holds what a verb writes and nothing else."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TextIO


@contextlib.contextmanager
def standard_output(*, protected: bool) -> Iterator[TextIO]:
    """Standard output; when protected, what libraries write there goes to standard error.

    XLA's collectives between CPU processes print a line for each peer from C++.
    """
    if not protected:
        yield sys.stdout
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(kept), "w", encoding="utf-8") as out:
            yield out
    finally:
        os.dup2(kept, 1)
        os.close(kept)
