"""Where results that take long are kept."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$COLOSSAX_CACHE`, else `$XDG_CACHE_HOME/colossax`, else `~/.cache/colossax`."""
    folder = os.environ.get("COLOSSAX_CACHE")
    if folder:
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "colossax"
