"""Where results that take long are kept."""

import json
import os
import re
from pathlib import Path
from typing import Any

from colossax.config.frozen import from_json, to_json
from colossax.config.paths import user_path
from colossax.documents import ANY_KIND, parse_json, read_small, why
from colossax.errors import InputError
from colossax.files import write_whole


def cache_folder() -> Path:
    """`$COLOSSAX_CACHE`, else `$XDG_CACHE_HOME/colossax`, else `~/.cache/colossax`.

    Raises:
        InputError: What is named there is no path.
    """
    folder = os.environ.get("COLOSSAX_CACHE")
    if folder:
        return user_path(folder, "COLOSSAX_CACHE", utf8=False)
    folder = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return user_path(folder, "XDG_CACHE_HOME", utf8=False) / "colossax"


def measured_path(folder: str, *names: str) -> Path:
    """The file in the cache folder that holds what was measured of something with these names."""
    plain = [re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") for name in names]
    return cache_folder().joinpath(folder, *plain[:-1], f"{plain[-1]}.json")


def write_measured(value: Any, path: Path, what: str) -> None:
    """Write a configuration dataclass as JSON, whole or not at all.

    Raises:
        InputError: The folder cannot be written; `what` it is, and where.
    """
    try:
        write_whole(path, json.dumps(to_json(value), indent=1, sort_keys=True) + "\n")
    except OSError as problem:
        raise InputError(
            f"{what} {path}: cannot be written ({problem.strerror}); make room there or name"
            f" another folder in COLOSSAX_CACHE"
        ) from problem


def read_measured(cls: type, path: Path, what: str, verb: str) -> Any:
    """What was written, None where nothing was.

    Raises:
        InputError: The file is damaged, or of a form that this version does not read; `verb`
            measures again.
    """
    try:
        data = parse_json(read_small(path), ANY_KIND)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as problem:
        raise InputError(
            f"{what} {path}: cannot be read ({why(problem)}); measure again with {verb}"
        ) from problem
    return from_json(cls, data, where=f"{what} {path}")
