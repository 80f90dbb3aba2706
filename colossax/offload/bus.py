"""What a step waits for of its transfers between device and host memory: one rule for all who
choose what lives where.

A bus carries both ways at once, so a step waits for the slower of them. Of what passes fetch and
store a part travels beside matmuls; updates after them have none beside them.
"""

import math
from typing import Any, NamedTuple

import numpy as np

BESIDE = 0.5
"""Of what forward and backward passes fetch and store, what has a matmul beside it in compiled
programs."""


class Way(NamedTuple):
    """Bytes of a step in one direction, or arrays of them.

    Attributes:
        passes: Of forward and backward passes, with updates that are made within them.
        end: Of updates after them.
    """

    passes: Any = 0
    end: Any = 0


class Traffic(NamedTuple):
    """Bytes of a step between device and host memory.

    Attributes:
        up: To the device.
        down: To the host.
    """

    up: Way = Way()
    down: Way = Way()

    def times(self, count: Any) -> "Traffic":
        """Of so many as this is of one; an array gives arrays."""
        return Traffic(*(Way(count * passes, count * end) for passes, end in self))

    def plus(self, other: "Traffic") -> "Traffic":
        """Of both."""
        pairs = zip(self, other, strict=True)
        return Traffic(*(Way(a.passes + b.passes, a.end + b.end) for a, b in pairs))

    @property
    def total(self) -> Any:
        """Bytes in both directions."""
        return sum(self.up) + sum(self.down)


def waited_bytes(
    traffic: Traffic, hides: int | float = math.inf, beside: tuple[float, float] = (BESIDE, BESIDE)
) -> Any:
    """Bytes of the slower direction that a step waits for.

    Args:
        traffic: Of the step; arrays give an array.
        hides: Bytes that travel in one direction while all of compute lasts, of those that may.
        beside: Of what passes move, what has a matmul beside it: to the device, to the host.
    """
    ways = zip(traffic, beside, strict=True)
    up, down = (passes + end - np.minimum(share * passes, hides) for (passes, end), share in ways)
    return np.maximum(up, down)
