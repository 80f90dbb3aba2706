"""Which layers keep what, exactly: the fastest mix of two policies that fits.

Of equal layers, `y_r` under a policy that takes `t_r` seconds and keeps `m_r` bytes, the least sum
of `y_r t_r` with a given number of layers and a bound on the sum of `y_r m_r` has two constraints,
so that an optimum has two policies at most, but for rounding to whole layers. All pairs are tried.
"""

import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """What a layer keeps, and what that costs.

    Attributes:
        names: See `SAVEABLE`.
        seconds: Of a layer, forward and backward.
        bytes: Kept of a layer.
    """

    names: frozenset[str]
    seconds: float
    bytes: float


def undominated(policies: Sequence[Policy]) -> list[Policy]:
    """Those of which no other is as fast and as small, the smallest first."""
    ordered = sorted(policies, key=lambda one: (one.bytes, one.seconds))
    found: list[Policy] = []
    for one in ordered:
        if not found or one.seconds < found[-1].seconds:
            found.append(one)
    return found


def fastest_mix(
    policies: Sequence[Policy], layers: int, room: float
) -> tuple[tuple[int, Policy], ...] | None:
    """Layers by policy, so that they are fastest and keep at most `room` bytes; None: none do.

    Args:
        policies: One or more.
        layers: How many layers there are.
        room: For what all of them keep.

    Cost: the square of the policies that no other beats.
    """
    best: tuple[float, tuple[tuple[int, Policy], ...]] | None = None
    kept = undominated(policies)
    for at, small in enumerate(kept):
        for large in kept[at:]:
            more = large.bytes - small.bytes
            left = room - layers * small.bytes
            if left < 0:
                continue
            count = layers if more * layers <= left else math.floor(left / more)
            mix = [(layers - count, small), (count, large)]
            seconds = sum(number * one.seconds for number, one in mix)
            if best is None or seconds < best[0]:
                best = seconds, tuple((number, one) for number, one in mix if number)
    return None if best is None else best[1]
