"""The kernels of `attend`, run by JAX's interpreter: for tests, on one CPU device.

It is slow, it cannot stand inside `jax.checkpoint`, and it looks for races
(`compat.races_found`).
"""

from typing import Any

from colossax.pallas.attention.spec import AttentionSpec
from colossax.pallas.target import Target

from . import attend as kernels


def why_not(spec: AttentionSpec, target: Target) -> str | None:
    """As for the kernels, on a CPU."""
    if target.platform != "cpu":
        return f"kernels are interpreted on a CPU, the target is '{target.platform}'"
    return kernels.why_not_call(spec)


ranges_of = kernels.ranges_of


def attend(*arrays: Any, **options: Any) -> Any:
    """See `attend.attend`."""
    return kernels.attend(*arrays, **options, interpret=True)


def attend_block(*arrays: Any, **options: Any) -> Any:
    """See `block.attend_block`."""
    return kernels.attend_block(*arrays, **options, interpret=True)


def block_gradients(*arrays: Any, **options: Any) -> Any:
    """See `block.block_gradients`."""
    return kernels.block_gradients(*arrays, **options, interpret=True)
