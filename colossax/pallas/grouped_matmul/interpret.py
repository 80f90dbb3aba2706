"""The Mosaic kernels, interpreted on a CPU: for their tests."""

import functools

from colossax.pallas.target import Target

from . import mosaic_gpu
from .spec import GroupedSpec


def why_not(spec: GroupedSpec, target: Target) -> str | None:
    """What the kernels decline, and any device that could run something faster."""
    if target.platform != "cpu":
        return f"the interpreter runs on a CPU, the target is '{target.platform}'"
    return mosaic_gpu.why_no_shape(spec)


multiply = functools.partial(mosaic_gpu.multiply, interpret=True)
weight_gradient = functools.partial(mosaic_gpu.weight_gradient, interpret=True)
