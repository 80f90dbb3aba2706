"""Compiled programs, kept from one start to the next in the user's cache folder.

Programs whose devices talk more than once are not kept on CPUs. XLA's CPU client orders the
collectives of a program that it compiled, but not of one that it read back: two of them that do not
depend on each other then begin in another order on each device, and all wait for ever. A step on
`row=2,col=4` read back hung within some 600 runs in each of eleven processes, in JAX 0.10.2 as in
0.12; compiled anew it did not in 11,000.
"""

import hashlib
import os
import platform
import re
from pathlib import Path
from typing import Any

import jax

from colossax import compat

_COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast)\("
)


def keep_programs(folder: Path, *, largest_bytes: int, seconds: float = 0.0) -> None:
    """Have JAX keep what it compiles in `folder`, and read from there what it kept before.

    Programs are kept apart by jaxlib and by the processor's features. A folder that cannot be
    written to keeps nothing, without a word.

    Args:
        folder: Made if need be; may be deleted at any time.
        largest_bytes: When the programs of this jaxlib and processor are larger, they go and the
            folder starts anew.
        seconds: Programs that compile faster are not kept.
    """
    place = folder / _kind()
    try:
        place.mkdir(parents=True, exist_ok=True)
        _bound(place, largest_bytes)
    except OSError:
        return
    jax.config.update("jax_compilation_cache_dir", str(place))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    compat.keep_only(lambda executable: not talks_more_than_once(executable))


def talks_more_than_once(executable: Any) -> bool:
    """Whether it runs on several host devices and has several collectives."""
    devices = executable.local_devices()
    if len(devices) == 1 or devices[0].platform != "cpu":
        return False
    modules = executable.hlo_modules()
    return sum(len(_COLLECTIVE.findall(module.to_string())) for module in modules) > 1


def _kind() -> str:
    """One per jaxlib and kind of processor: a program may hold instructions that another lacks."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
        told = b"".join(sorted({x for x in lines if x.startswith((b"flags", b"Features"))}))
    except OSError:
        told = platform.processor().encode()
    return f"{jax.lib.__version__}-{hashlib.sha256(told).hexdigest()[:8]}"


def _bound(folder: Path, largest_bytes: int) -> None:
    files = [entry for entry in os.scandir(folder) if entry.is_file()]
    if sum(entry.stat().st_size for entry in files) > largest_bytes:
        for entry in files:
            Path(entry.path).unlink(missing_ok=True)
