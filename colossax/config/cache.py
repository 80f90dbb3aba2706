"""Where results that take long are kept."""

import os
from pathlib import Path

from colossax.config.paths import user_path


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
