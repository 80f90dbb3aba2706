"""The Mosaic kernel, interpreted on a CPU: for its tests."""

import functools

from colossax.pallas.target import Target

from .mosaic_gpu import attend as mosaic
from .spec import PagedSpec


def why_not(spec: PagedSpec, target: Target) -> str | None:
    """What the kernel declines, and any device that could run something faster."""
    if target.platform != "cpu":
        return f"the interpreter runs on a CPU, the target is '{target.platform}'"
    return mosaic.why_not_call(spec)


attend = functools.partial(mosaic.attend, interpret=True)
