"""Seconds that a way to run needs at least, so that few of many have to be scored.

What no plan does without: matmuls forward and backward on all devices, recomputed as little as any
policy does, as often as stages run them; weights of layers gathered and their gradients summed so
often; what stages hand on; and what layers send for their tokens, as it was found on a mesh that
splits them likewise.
"""

import functools
import heapq
import math
from collections.abc import Iterator, Mapping

import numpy as np

from colossax.aot import Target
from colossax.config import MeshAxis, Plan
from colossax.planner.profiling import ModelProfile, bare
from colossax.planner.searching.meshes import AXES, Way, limits_of, meshes, ruled
from colossax.planner.searching.predicting import OnMesh, least_seconds
from colossax.planner.searching.seconds import Rates, Seconds
from colossax.planner.searching.stages import Stages

_TOKENS = (MeshAxis.DATA, MeshAxis.FSDP, MeshAxis.EXPERT)
_WITHIN = (MeshAxis.EXPERT, MeshAxis.RING, MeshAxis.ULYSSES, MeshAxis.TENSOR)


class Fastest:
    """The least of many numbers, so many of them.

    Attributes:
        slowest: Of those; infinite as long as there are fewer.
    """

    def __init__(self, count: int):
        self._count = count
        self._heap: list[float] = []
        self.slowest = math.inf

    def add(self, seconds: float) -> None:
        """One more."""
        heapq.heappush(self._heap, -seconds)
        if len(self._heap) > self._count:
            heapq.heappop(self._heap)
        if len(self._heap) == self._count:
            self.slowest = -self._heap[0]


class Bounds:
    """Of a model on a target."""

    def __init__(self, profile: ModelProfile, plan: Plan, target: Target, rates: Rates):
        self._profile, self._target, self._plan = profile, target, bare(plan)
        self._limits = limits_of(profile)
        self._sent: dict[tuple[int, ...], dict[tuple[str, bool], float]] = {}
        stacked = [
            info
            for info, learns in zip(profile.infos, profile.learns, strict=True)
            if learns and info.total_layers
        ]
        self._numbers = sum(
            math.prod(info.shape)
            for info in stacked
            if "embed" in info.dims and "experts" not in info.dims
        )
        self._experts = sum(
            math.prod(info.shape)
            for info in stacked
            if "experts" in info.dims and "expert_embed" in info.dims
        )
        own = [link.bytes_per_s for link in rates.kinds.values()]
        self._rates, self._within = rates, max([rates.node.bytes_per_s, *own])
        self._between = max([rates.network.bytes_per_s, *own])
        self._wide = np.dtype(plan.precision.compute).itemsize
        reduced = (plan.precision.reduction or plan.precision.compute, plan.precision.accumulation)
        self._summed = min(np.dtype(each).itemsize for each in reduced)
        self._at_rest = np.dtype(plan.precision.params).itemsize
        self._layers, self._ends = least_seconds(profile, target, rates)

    def ordered(self, pinned: Mapping[str, int]) -> Iterator[tuple[float, dict[str, int], Way]]:
        """All ways with seconds that they need at least, the fewest first."""
        every = [
            (self.of(mesh, way), mesh, way)
            for mesh in meshes(self._target, self._limits, pinned)
            for way in ruled(self._plan, mesh, self._limits, pinned)
        ]
        yield from sorted(every, key=lambda one: one[0])

    def of(self, mesh: Mapping[str, int], way: Way) -> float:
        """Seconds that it needs at least: with the number of microbatches that is best for it."""
        rows = self._rows(mesh)
        counts = (1,) if mesh[MeshAxis.STAGE] == 1 else divisors(rows)
        return min(self._of(mesh, way, rows, count) for count in counts)

    def _of(self, mesh: Mapping[str, int], way: Way, rows: int, microbatches: int) -> float:
        count, along = mesh[MeshAxis.STAGE], mesh[MeshAxis.RING] * mesh[MeshAxis.ULYSSES]
        stages = Stages(count=count, chunks=way.chunks)
        turns = stages.turns(microbatches)
        tokens = rows * self._profile.tokens / along
        waited = beside = 0.0
        for (axis, hidden), sent in self._sent.get(self._key(mesh), {}).items():
            seconds = turns * tokens / count * sent / self._rate(mesh, MeshAxis(axis))
            waited, beside = (waited, beside + seconds) if hidden else (waited + seconds, beside)
        if count > 1:
            held = tokens / mesh[MeshAxis.TENSOR] * self._profile.width * self._wide
            sent = 2 * stages.runs(microbatches) / microbatches + 2
            waited += sent * held / self._rate(mesh, MeshAxis.STAGE)
        gathers, states = self._weights(mesh, way, turns * microbatches)
        return Seconds(
            compute=turns * self._layers + self._ends,
            waited=waited + states,
            beside=beside + gathers,
            hiding=self._rates.hiding,
            slowing=self._rates.slowing,
        ).total

    def _weights(self, mesh: Mapping[str, int], way: Way, runs: float) -> tuple[float, float]:
        """Of gathers of weights and sums of gradients, that compute may hide; of new parameters."""
        data, fsdp, expert = (mesh[axis] for axis in _TOKENS)
        along = mesh[MeshAxis.RING] * mesh[MeshAxis.ULYSSES]
        inner = mesh[MeshAxis.TENSOR] * mesh[MeshAxis.STAGE]
        numbers, experts = self._numbers / inner, self._experts / inner / expert / along
        sums = 1.0 if way.once else runs
        if not way.stored:
            axis = MeshAxis.DATA if data > 1 else MeshAxis.FSDP
            rate = self._rate(mesh, axis)
            one = (1 - 1 / (data * fsdp * expert)) / rate
            theirs = (1 - 1 / (data * fsdp)) / rate
            sent = one * numbers + theirs * experts
            return sums * self._summed * sent, self._at_rest * sent
        gathers = 1.0 if way.whole else 2 * runs
        own = (1 - 1 / (fsdp * expert)) * numbers + (1 - 1 / fsdp) * experts
        sent = (gathers * self._wide + sums * self._summed) * own
        found = sent / self._rate(mesh, MeshAxis.FSDP)
        if data > 1:
            held = self._summed * (numbers / fsdp / expert / along + experts / fsdp)
            found += 2 * (1 - 1 / data) * sums * held / self._rate(mesh, MeshAxis.DATA)
        return found, 0.0

    def _rate(self, mesh: Mapping[str, int], axis: MeshAxis) -> float:
        """Bytes a second of the slowest link in a ring along an axis."""
        span = math.prod(mesh[inner] for inner in AXES[AXES.index(axis) :])
        return self._within if self._target.gpus % span == 0 else self._between

    def learn(self, mesh: Mapping[str, int], on_mesh: OnMesh) -> None:
        """What layers of such a mesh send for a token."""
        key = self._key(mesh)
        if key not in self._sent:
            self._sent[key] = on_mesh.least_sent()

    def _rows(self, mesh: Mapping[str, int]) -> int:
        return self._profile.rows // math.prod(mesh[axis] for axis in _TOKENS)

    def _key(self, mesh: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(mesh[axis] for axis in _WITHIN)


@functools.cache
def divisors(number: int) -> tuple[int, ...]:
    """All of them, the least first."""
    return tuple(n for n in range(1, number + 1) if number % n == 0)
