"""Paths and texts as people write them."""

import contextlib
import os
from pathlib import Path

from colossax.errors import InputError


def user_path(text: str | os.PathLike[str], name: str, *, utf8: bool = True) -> Path:
    """A path as it was written, `~` being a home folder; it need not be there.

    Args:
        text: The path.
        name: What it is of, for messages, such as `--out`.
        utf8: Whether it has to be UTF-8 from the root on, as TensorStore and JSON take no other;
            what Python alone reads need not be.

    Raises:
        InputError: It is empty, has a home that nobody has, is one that no system takes, or is not
            UTF-8, for which the working folder counts where it begins there.
    """
    if not os.fspath(text):
        raise InputError(f"{name}: is empty; name a file or a folder")
    if utf8:
        check_text(os.fspath(text), name)
    path = Path(text)
    try:
        path = path.expanduser()
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass
    except RuntimeError:
        raise InputError(
            f"{name} {text}: nobody has the home '{path.parts[0]}'; write it out"
        ) from None
    except (OSError, ValueError) as problem:
        why = getattr(problem, "strerror", None) or str(problem)
        raise InputError(f"{name}: no path can be called so ({why}); name another") from None
    if utf8:
        with contextlib.suppress(FileNotFoundError):  # of a working folder that was deleted
            check_text(os.fspath(path.absolute()), f"{name} {text}: from the root on")
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
