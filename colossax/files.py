"""Files that are whole or not there."""

import contextlib
import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a text file whole or not at all; its folder is made where it is missing.

    Readers see the old file or the new one. A power loss may take the new one: what has to be
    there after it is flushed first, and does not go through here.

    Raises:
        OSError: It cannot be written; what was there stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
