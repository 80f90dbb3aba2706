"""Keeps standard error readable where JAX's CUDA plugin is installed for its compiler alone."""

import contextlib
import ctypes
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")


class Captured:
    """What was written meanwhile."""

    text = ""


def captured_stderr() -> contextlib.AbstractContextManager[Captured]:
    """Keep what is written to the process's standard error, by code that is not Python as well."""
    return _captured(2, sys.stderr)


def captured_stdout() -> contextlib.AbstractContextManager[Captured]:
    """Keep what is written to the process's standard output, likewise."""
    return _captured(1, sys.stdout)


@contextlib.contextmanager
def _captured(descriptor: int, stream: Any) -> Iterator[Captured]:
    captured = Captured()
    libc = ctypes.CDLL(None)
    stream.flush()
    libc.fflush(None)
    with tempfile.TemporaryFile() as file:
        kept = os.dup(descriptor)
        os.dup2(file.fileno(), descriptor)
        try:
            yield captured
        finally:
            stream.flush()
            libc.fflush(None)
            os.dup2(kept, descriptor)
            os.close(kept)
            file.seek(0)
            captured.text = file.read().decode(errors="replace")


def cuda_plugin() -> Path | None:
    """The CUDA plugin's library, or None where there is no plugin."""
    for name in _PLUGINS:
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            continue
        if spec is not None and spec.origin is not None:
            return Path(spec.origin).parent / "xla_cuda_plugin.so"
    return None


def import_jax() -> None:
    """Import JAX; where its CUDA plugin has no driver to talk to, tell JAX so in its place.

    JAX would print a traceback and the plugin two lines for each of its libraries, in every
    program on a machine that has the plugin in order to compile for GPUs that are not there.
    """
    if _HOOK in sys.meta_path:
        sys.meta_path.remove(_HOOK)
    library = _plugin_without_driver()
    if library is None:
        import jax  # noqa: F401

        return
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with captured_stderr():
        import jax

        # Imported before, it has not read the environment just set.
        if jax.config.values["jax_platforms"] is None:
            jax.config.update("jax_platforms", "cpu")
        _load(library)


def before_jax() -> None:
    """Do the same for a program that imports JAX itself, now or later, without importing it."""
    if "jax" in sys.modules:
        import_jax()
    elif _HOOK not in sys.meta_path:
        sys.meta_path.insert(0, _HOOK)


class _BeforeJax:
    """Is asked when JAX is imported, and has it imported quietly."""

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> Any:
        """That of JAX where its plugin has no driver; None for all else."""
        if name != "jax":
            return None
        sys.meta_path.remove(self)
        library = _plugin_without_driver()
        if library is None:
            return None
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            quietly = _quietly(spec.loader.exec_module, library)
            spec.loader.exec_module = quietly  # type: ignore[bad-assignment]
        return spec


def _quietly(execute: Callable[[ModuleType], None], library: Path) -> Callable[[ModuleType], None]:
    """JAX's own modules load more libraries of the plugin while they are imported."""

    def executed(module: ModuleType) -> None:
        with captured_stderr():
            execute(module)
            _load(library)

    return executed


_HOOK = _BeforeJax()


def _load(library: Path) -> None:
    """Loaded by JAX later, it would write its lines then; what keeps it out, JAX will say."""
    with contextlib.suppress(OSError):
        ctypes.CDLL(str(library))


def _plugin_without_driver() -> Path | None:
    library = cuda_plugin()
    return None if library is None or _driver_installed() else library


def _driver_installed() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
