"""Programs that tests compile are kept from one run to the next, outside of the tree.

Half of what a run takes is compiling, and most programs are those of the run before. The folder
may be deleted at any time; `COLOSSAX_TEST_PROGRAMS=none` does without.
"""

import hashlib
import os
import platform
from pathlib import Path

LARGEST_BYTES = 2 * 2**30


def keep():
    """Tell JAX, in this process and those it starts, where programs are kept.

    What the caller says in JAX's own variable stands.
    """
    if (
        os.environ.get("COLOSSAX_TEST_PROGRAMS") == "none"
        or "JAX_COMPILATION_CACHE_DIR" in os.environ
    ):
        return
    folder = _folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return  # a home that cannot be written to makes tests slower, no more
    _trim(folder)
    os.environ |= {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }


def _folder():
    """One per kind of processor: a program holds instructions that another may not know."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "colossax" / "test_programs" / hashlib.sha256(_processor()).hexdigest()[:8]


def _processor():
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.processor().encode()
    return b"".join(sorted({line for line in lines if line.startswith((b"flags", b"Features"))}))


def _trim(folder):
    """Start anew rather than grow for ever."""
    files = [entry for entry in os.scandir(folder) if entry.is_file()]
    if sum(entry.stat().st_size for entry in files) > LARGEST_BYTES:
        for entry in files:
            Path(entry.path).unlink(missing_ok=True)
