"""What it costs that an axis of the sequence does not divide what is stored over it."""

import math
from typing import Any

import numpy as np

from colossax.config import BoundPlan
from colossax.sharding import left_whole, param_sharding
from colossax.sharding.rules import home
from colossax.step.state import StateLayout
from colossax.typing import ParamInfo


def cost_of_whole(bound: BoundPlan, infos: Any, learning: Any, layout: StateLayout) -> str | None:
    """A line for people: which axes, and bytes per device of what stays whole along them.

    Args:
        bound: Plan and devices.
        infos: Leaves of all parameters.
        learning: Leaves of those that get a gradient.
        layout: Of the state, for the optimizer's.

    Returns:
        None where nothing stays whole so.
    """
    precision, found, total = bound.plan.precision, dict[str, None](), 0

    def count(role: str, info: ParamInfo, dtype: Any) -> None:
        nonlocal total
        axes = left_whole(home(bound, info), role, info.dims, info.shape)
        if axes:
            found.update(dict.fromkeys(axes))
            held = param_sharding(bound, role, info).shard_shape(info.shape)
            bytes_held = math.prod(held) * np.dtype(dtype).itemsize
            total += bytes_held - bytes_held // bound.size(axes)

    for info in infos:
        count("params", info, info.at_rest(precision.params))
    for info in learning:
        count("gradients", info, precision.accumulation)
    layout.map_moments(
        lambda leaf, info: leaf.shape == info.shape and count("optimizer", info, leaf.dtype),
        lambda leaf: None,
    )
    if not found:
        return None
    shown = ", ".join(f"{axis}={bound.mesh.shape[axis]}" for axis in found)
    return (
        f"plan.mesh: {shown} does not divide every dim that is stored over it: parameters,"
        f" gradients and optimizer state stay whole there, which costs {total:,} bytes per device"
    )
