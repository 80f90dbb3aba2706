"""Kernels that were compiled for programs before, kept for those that have the same ones.

Making kernels takes two thirds of a compilation, and plans of one model share most of theirs. XLA
reads and writes a file of them; here each compilation has a copy of its own, which takes the place
of the file when it is done, so that several at once or one that is stopped do no harm.
"""

import contextlib
import contextvars
import hashlib
import importlib.metadata
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from colossax.aot.targets import Gpu
from colossax.config import cache_folder

LARGEST_BYTES = 256 * 2**20
"""A file that is larger is begun anew: each compilation reads all of it."""

_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "jaxlib")

_KEEPING = contextvars.ContextVar("colossax_keeping_kernels", default=True)


@contextlib.contextmanager
def kernels_anew() -> Iterator[None]:
    """Inside, programs are compiled whole and leave nothing."""
    token = _KEEPING.set(False)
    try:
        yield
    finally:
        _KEEPING.reset(token)


@contextlib.contextmanager
def kept_kernels(gpu: Gpu, folder: Path) -> Iterator[Mapping[str, Any]]:
    """Compiler options by which one compilation takes what is kept, and adds to it.

    Args:
        gpu: What is compiled for.
        folder: Where the copy may lie until then.

    Where nothing can be read or written, nothing is kept; with an error inside, what was kept goes.
    """
    if not _KEEPING.get():
        yield {}
        return
    kept, own = _file_of(gpu), folder / "kernels"
    with contextlib.suppress(OSError):
        if kept.stat().st_size <= LARGEST_BYTES:
            shutil.copyfile(kept, own)
    before = own.stat().st_size if own.exists() else 0
    try:
        yield {
            "xla_gpu_kernel_cache_file": str(own),
            "xla_gpu_enable_llvm_module_compilation_parallelism": True,
        }
    except BaseException:
        with contextlib.suppress(OSError):
            kept.unlink()
        raise
    with contextlib.suppress(OSError):
        if own.stat().st_size != before:
            kept.parent.mkdir(parents=True, exist_ok=True)
            part = kept.with_name(f"{kept.name}.{os.getpid()}.part")
            shutil.copyfile(own, part)
            part.replace(kept)


def _file_of(gpu: Gpu) -> Path:
    """Of this GPU, and of what compiles for it."""
    facts = [gpu.name, os.environ.get("XLA_FLAGS", ""), *map(_version, _PLUGINS)]
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
    return cache_folder() / "kernels" / f"{digest}.bin"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
