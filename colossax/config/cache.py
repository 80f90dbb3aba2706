"""Where results that take long are kept."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$COLOSSAX_CACHE`, else `$XDG_CACHE_HOME/colossax`, else `~/.cache/colossax`."""
    own = os.environ.get("COLOSSAX_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "colossax"
