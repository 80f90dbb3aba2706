"""Kernels that were compiled for programs before, kept for those that have the same ones.

Making kernels takes two thirds of a compilation, and plans of one model share most of theirs. XLA
reads and writes a file of them; here each compilation has a copy of its own, which takes the place
of the file when it is done, so that several at once or one that is stopped do no harm.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from colossax.aot.targets import Gpu
from colossax.config import cache_folder
from colossax.versions import version_of

LARGEST_BYTES = 256 * 2**20
"""A file that is larger is begun anew: each compilation reads all of it."""

_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "jaxlib")

_VARIABLE = "COLOSSAX_KEPT_KERNELS"
"""Of the environment, which children inherit; with `none` all is compiled, and nothing kept."""


@contextlib.contextmanager
def kernels_anew() -> Iterator[None]:
    """Inside, programs are compiled whole and leave nothing, those of child processes too."""
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = "none"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before


@contextlib.contextmanager
def kept_kernels(gpu: Gpu, folder: Path) -> Iterator[Mapping[str, Any]]:
    """Compiler options by which one compilation takes what is kept, and adds to it.

    Args:
        gpu: What is compiled for.
        folder: Where the copy may lie until then.

    Where nothing can be read or written, or an error comes from inside, nothing is kept.
    """
    if os.environ.get(_VARIABLE) == "none":
        yield {}
        return
    kept, own = _file_of(gpu), folder / "kernels"
    with contextlib.suppress(OSError):
        if kept.stat().st_size <= LARGEST_BYTES:
            shutil.copyfile(kept, own)
    before = own.stat().st_size if own.exists() else 0
    yield {
        "xla_gpu_kernel_cache_file": str(own),
        "xla_gpu_enable_llvm_module_compilation_parallelism": True,
    }
    with contextlib.suppress(OSError):
        if own.stat().st_size != before:
            kept.parent.mkdir(parents=True, exist_ok=True)
            part = kept.with_name(f"{kept.name}.{os.getpid()}.part")
            shutil.copyfile(own, part)
            part.replace(kept)


def forget_kernels(gpu: Gpu) -> None:
    """Begin the file of a GPU anew."""
    with contextlib.suppress(OSError):
        _file_of(gpu).unlink()


def _file_of(gpu: Gpu) -> Path:
    """Of this GPU, and of what compiles for it."""
    facts = [gpu.name, os.environ.get("XLA_FLAGS", ""), *map(version_of, _PLUGINS)]
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
    return cache_folder() / "compiled_kernels" / f"{digest}.bin"
