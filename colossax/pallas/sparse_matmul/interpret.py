"""The Mosaic kernel, interpreted on a CPU: for its tests."""

import functools

from colossax.pallas.target import Target

from . import mosaic_gpu
from .spec import SparseSpec


def why_not(spec: SparseSpec, target: Target) -> str | None:
    """What the kernel declines, and any device that could run something faster."""
    if target.platform != "cpu":
        return f"the interpreter runs on a CPU, the target is '{target.platform}'"
    return mosaic_gpu.why_not_call(spec)


multiply = functools.partial(mosaic_gpu.multiply, interpret=True)
