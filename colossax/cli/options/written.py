"""Files that a verb is asked for, and writes once it has its answer."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from colossax.config import user_path
from colossax.errors import InputError


def file_to_write(text: str | Path | None, option: str) -> Path | None:
    """The path of a file that is asked for, which may take minutes to answer: it can be written as
    things stand. None where nothing is asked for.

    Args:
        text: As it was given.
        option: Of the command line, for messages.

    Raises:
        InputError: It is empty or a folder, or its folder is not there or takes no files.
    """
    if text is None:
        return None
    path = user_path(text, option)
    if path.is_dir():
        raise InputError(f"{option} {path}: is a folder; name a file in it")
    if not path.parent.is_dir():
        raise InputError(f"{option} {path}: there is no folder {path.parent}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InputError(f"{option} {path}: cannot be written; choose another")
    return path


@contextlib.contextmanager
def writing(*paths: Path | None) -> Iterator[None]:
    """What is written to these.

    Raises:
        InputError: It could not be.
    """
    try:
        yield
    except OSError as problem:
        name = problem.filename or next(filter(None, paths))
        raise InputError(
            f"'{name}' cannot be written: {problem.strerror}; choose another"
        ) from None
