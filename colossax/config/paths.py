"""Paths and texts as people write them."""

import os
from pathlib import Path

from colossax.errors import InputError


def user_path(text: str | os.PathLike[str], name: str) -> Path:
    """A path as it was written, `~` being a home folder; it need not be there.

    Args:
        text: The path.
        name: What it is of, for messages, such as `--out`.

    Raises:
        InputError: It is empty, has a home that nobody has, or is one that no system takes.
    """
    if not os.fspath(text):
        raise InputError(f"{name}: is empty; name a file or a folder")
    path = Path(text)
    try:
        path = path.expanduser()
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return path
    except RuntimeError:
        raise InputError(
            f"{name} {text}: nobody has the home '{path.parts[0]}'; write it out"
        ) from None
    except (OSError, ValueError) as problem:
        why = getattr(problem, "strerror", None) or str(problem)
        raise InputError(f"{name}: no path can be called so ({why}); name another") from None
    return path


def check_text(text: str, name: str) -> None:
    """Refuse what no file in UTF-8 can hold: bytes of a terminal that were no characters.

    Raises:
        InputError: It has half a character, a surrogate.
    """
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise InputError(
            f"{name}: character {problem.start + 1} is none, but a byte that is not UTF-8, or half"
            " a pair; write the text in UTF-8"
        ) from None
