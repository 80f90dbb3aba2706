"""Seconds of a step by formula, to rank plans by.

Matmuls run at a share of the GPU's peak; collectives take `(n - 1)` latencies and their bytes at
the rate of the slowest link in their ring. Gathers of weights and sums of gradients are beside
compute, as long as that lasts; sums of activations are waited for.
"""

import dataclasses
import math
from collections.abc import Sequence

from colossax.aot import Link, Target
from colossax.config import MESH_AXES
from colossax.planner.searching.parts import Parts
from colossax.planner.searching.sends import Sent

MATMULS, PAIRS, HIDING, SLOWING = 0.65, 0.45, 0.9, 0.05
"""Shares taken where nothing was measured: of the peak, that matmuls with weights and attention
reach; of a step's compute, that collectives can be beside; of the time of those, what they take of
the compute beside them, as they need some multiprocessors and some of the memory's rate."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seconds:
    """Of a step.

    Attributes:
        compute: Matmuls, recomputation among them.
        waited: Collectives that compute waits for.
        beside: Those that compute can hide.
    """

    compute: float
    waited: float
    beside: float

    @property
    def exposed(self) -> float:
        """Of those beside compute, what it does not last for."""
        return max(0.0, self.beside - HIDING * self.compute)

    @property
    def total(self) -> float:
        """What a step takes."""
        return self.compute + self.waited + self.exposed + self.slowed

    @property
    def slowed(self) -> float:
        """What collectives beside compute take of it."""
        return SLOWING * (self.beside - self.exposed)


def link_along(target: Target, parts: Parts, axes: Sequence[str]) -> Link:
    """The slowest link that a ring along these axes crosses, devices filling nodes in order."""
    sizes = parts.bound.mesh.shape
    inner = [axis for axis in MESH_AXES if axis in axes]
    if not inner:
        return target.gpu.nvlink
    behind = MESH_AXES[MESH_AXES.index(inner[0]) :]
    span = math.prod(sizes[axis] for axis in behind)
    return target.gpu.nvlink if target.gpus % span == 0 else target.network


def collectives_seconds(target: Target, parts: Parts, sent: Sequence[Sent]) -> tuple[float, float]:
    """Seconds that are waited for, and that compute may hide."""
    found = [0.0, 0.0]
    for one in sent:
        link = link_along(target, parts, one.axes)
        hops = (parts.size(one.axes) - 1) * one.times * link.latency_s
        found[one.hidden] += hops + one.bytes / link.bytes_per_s
    return found[0], found[1]
