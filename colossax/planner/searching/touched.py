"""What a device reads and writes of its own memory beside what it multiplies.

The optimizer reads a gradient and reads and writes a parameter with its moments; where several
microbatches are added up, each reads the sums, reads its own gradients and writes the sums. Of
plans that compute and send alike this makes those faster that have fewer microbatches and smaller
parts.
"""

import math

import numpy as np

from colossax.planner.profiling import ModelProfile
from colossax.planner.searching.parts import Parts


def touched_by_step(profile: ModelProfile, parts: Parts) -> float:
    """Bytes of a device that an update reads and writes."""
    precision = parts.bound.plan.precision
    adds = np.dtype(precision.accumulation).itemsize
    total = 0.0
    for info, moment, learns in zip(profile.infos, profile.moments, profile.learns, strict=True):
        if learns:
            own = parts.size(parts.axes("optimizer", info.dims, info.shape))
            each = updated_bytes(moment, info.at_rest(precision.params).itemsize, adds)
            total += each * math.prod(info.shape) / own
    return total


def updated_bytes(moments: float, at_rest: int, adds: int) -> float:
    """Of a number, bytes that its update reads and writes.

    Args:
        moments: Of its optimizer state.
        at_rest: Of the number.
        adds: Of its gradient.
    """
    return 2 * (moments + at_rest) + adds


def touched_by_microbatch(gradients: float, microbatches: int) -> float:
    """Bytes of a device that adding up takes, a microbatch; none where there is one alone.

    Args:
        gradients: Bytes of all that a device holds.
        microbatches: A step.
    """
    return 3 * gradients if microbatches > 1 else 0.0
