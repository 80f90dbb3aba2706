"""Compiled programs, kept from one start to the next in the user's cache folder.

Programs whose devices talk more than once are not kept on CPUs. XLA's CPU client orders the
collectives of a program that it compiled, but not of one that it read back: two of them that do not
depend on each other then begin in another order on each device, and all wait for ever. A step on
`row=2,col=4` read back hung within some 600 runs in each of eleven processes, in JAX 0.10.2 as in
0.12; compiled anew it did not in 11,000.
"""

import contextlib
import hashlib
import os
import platform
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from colossax import compat
from colossax.config import cache_folder
from colossax.quiet import captured_stderr

_COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast)\("
)


_SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)
_DECIDE = ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE")
_LARGEST_BYTES = 2 * 2**30
_LOADER = "cpu_aot_loader"
_ONE_AT_A_TIME = threading.Lock()


@contextlib.contextmanager
def kept_programs(*, wanted: bool = True) -> Iterator[None]:
    """Within, programs are kept under the user's cache folder and read from there.

    Nothing happens where JAX's environment variables or its settings say what to keep. Afterwards
    its settings are what they were. An entry that is rejected or broken goes, without a word, and
    its program is compiled.
    """
    decided = jax.config.values["jax_compilation_cache_dir"] is not None
    enabled = jax.config.values["jax_enable_compilation_cache"]
    if not wanted or decided or not enabled or any(name in os.environ for name in _DECIDE):
        yield
        return
    before = {name: jax.config.values[name] for name in _SETTINGS}
    folder = cache_folder() / "programs"
    undo = keep_programs(folder, largest_bytes=_LARGEST_BYTES, read=_read_quietly)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        undo()


def _read_quietly(read: Callable[..., Any], key: str, *rest: Any) -> Any:
    """An entry, or (None, None) where there is none that can be used.

    XLA's CPU client writes lines of its own where it finds features in an entry that the processor
    lacks, among them some that are no features but preferences: source, JAX issue 38445.
    """
    with _ONE_AT_A_TIME, captured_stderr() as said:
        try:
            found = read(key, *rest)
        except Exception:  # noqa: BLE001 (whatever is wrong with it, it can be compiled)
            entry = Path(jax.config.values["jax_compilation_cache_dir"]) / f"{key}-cache"
            entry.unlink(missing_ok=True)  # JAX would not write over it
            found = (None, None)
    sys.stderr.writelines(line for line in said.text.splitlines(True) if _LOADER not in line)
    return found


def keep_programs(
    folder: Path,
    *,
    largest_bytes: int,
    seconds: float = 0.0,
    read: Callable[..., Any] = compat.through,
) -> Callable[[], None]:
    """Have JAX keep what it compiles in `folder`, and read from there what it kept before.

    Programs are kept apart by jaxlib and by the processor's features. A folder that cannot be
    written to keeps nothing, without a word.

    Args:
        folder: Made if need be; may be deleted at any time.
        largest_bytes: When the programs of this jaxlib and processor are larger, they go and the
            folder starts anew.
        seconds: Programs that compile faster are not kept.
        read: What entries are read through; see `compat.wrap_cache`.

    Returns:
        What stops it, but for JAX's settings.
    """
    place = folder / _kind()
    try:
        place.mkdir(parents=True, exist_ok=True)
        _bound(place, largest_bytes)
    except OSError:
        return lambda: None
    jax.config.update("jax_compilation_cache_dir", str(place))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    return compat.wrap_cache(read=read, write=_write_what_is_safe)


def _write_what_is_safe(
    write: Callable[..., Any], key: str, name: str, executable: Any, *rest: Any
) -> None:
    if not talks_more_than_once(executable):
        with contextlib.suppress(OSError):
            write(key, name, executable, *rest)


def talks_more_than_once(executable: Any) -> bool:
    """Whether it runs on several host devices and has several collectives."""
    devices = executable.local_devices()
    alone = len(devices) == 1 and jax.process_count() == 1
    if alone or devices[0].platform != "cpu":
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
