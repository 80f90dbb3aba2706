"""Seconds that a way to run needs at least, so that few of many have to be scored.

What no plan does without: matmuls forward and backward on all devices, recomputed as little as
memory lets any mix of policies, as often as stages run them; weights of layers gathered and their
gradients summed so often; what stages hand on; and what layers send for their tokens, as it was
found on a mesh that splits them likewise.
"""

import bisect
import functools
import heapq
import math
from collections.abc import Iterator, Mapping

import numpy as np

from colossax.aot import Link, Target
from colossax.config import MESH_AXES, MeshAxis, Plan
from colossax.planner.profiling import ModelProfile, bare
from colossax.planner.searching.experts import WEIGHTS, experts_sent
from colossax.planner.searching.forms import Forms
from colossax.planner.searching.memory import working_of
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

    def __init__(
        self,
        profile: ModelProfile,
        plan: Plan,
        target: Target,
        rates: Rates,
        room: float = math.inf,
    ):
        """Args:
        profile: The model.
        plan: See `search`.
        target: Where.
        rates: Of devices and links.
        room: Bytes of a device.
        """
        self._profile, self._target, self._plan = profile, target, bare(plan)
        self._limits = limits_of(profile)
        self._forms = Forms(profile, plan, target, rates)
        self._sent: dict[tuple[int, ...], dict[tuple[str, bool], float]] = {}
        learned = [
            (kind.calls, profile.infos[at])
            for kind in profile.kinds
            for at in kind.leaves
            if profile.learns[at]
        ]
        dense = [one for one in learned if "embed" in one[1].dims and "experts" not in one[1].dims]
        experts = [one for one in learned if {"experts", "expert_embed"} <= set(one[1].dims)]
        self._numbers, self._experts = (
            sum(calls * math.prod(info.shape) / info.shape[0] for calls, info in some)
            for some in (dense, experts)
        )
        self._collectives = sum(calls for calls, _ in dense)
        widths = [info.shape[info.dims.index("embed")] for _, info in dense]
        widths += [info.shape[info.dims.index("expert_embed")] for _, info in experts]
        self._embed = functools.reduce(math.gcd, widths, 0)
        self._rates, kinds = rates, list(rates.kinds.values())
        inside = [*kinds, *rates.within.values()]
        self._within, self._between = (
            Link(
                name="bound",
                latency_s=min(each.latency_s for each in links),
                bytes_per_s=max(each.bytes_per_s for each in links),
            )
            for links in ([rates.node, *inside], [rates.network, *kinds])
        )
        self._wide = np.dtype(plan.precision.compute).itemsize
        reduced = (plan.precision.reduction or plan.precision.compute, plan.precision.accumulation)
        self._summed = min(np.dtype(each).itemsize for each in reduced)
        self._at_rest = np.dtype(plan.precision.params).itemsize
        numbers = [math.prod(info.shape) for info in profile.infos]
        pairs = list(zip(numbers, profile.infos, profile.moments, strict=True))
        params = plan.precision.params
        self._parameters = sum(n * info.at_rest(params).itemsize for n, info, _ in pairs)
        self._moments = sum((n * moment for n, _, moment in pairs), 0.0)
        adds = np.dtype(plan.precision.accumulation).itemsize
        layers = zip(pairs, profile.learns, strict=True)
        learned = (n for (n, info, _), learns in layers if learns and info.total_layers is not None)
        self._gradients = adds * sum(learned)
        self._working = working_of(profile, np.dtype(plan.precision.compute).itemsize)
        self._room = room
        self._policies, self._ends = least_seconds(profile, target, rates)

    def ordered(self, pinned: Mapping[str, int]) -> Iterator[tuple[float, dict[str, int], Way]]:
        """All ways with seconds that they need at least, the fewest first."""
        every = [
            (self.of(mesh, way), mesh, way)
            for mesh in meshes(self._target, self._limits, pinned)
            for way in ruled(self._plan, mesh, self._limits, pinned, self._forms)
        ]
        yield from sorted(every, key=lambda one: one[0])

    def of(self, mesh: Mapping[str, int], way: Way) -> float:
        """Seconds that it needs at least: with the number of microbatches that is best for it, of
        those whose layers' inputs fit; infinite where none do."""
        rows, room, found = self._rows(mesh), self._left(mesh, way), math.inf
        inner = mesh[MeshAxis.RING] * mesh[MeshAxis.ULYSSES] * mesh[MeshAxis.TENSOR]
        stages = Stages(count=mesh[MeshAxis.STAGE], chunks=way.chunks)
        for count in divisors(rows):
            each = rows / count / inner
            left = room - each * self._working
            layers = self._least(left * stages.share / stages.slots(count) / each)
            if math.isinf(layers):
                continue
            found = min(found, self._of(mesh, way, rows, count, layers))
            if stages.count == 1 and layers == self._least(math.inf):
                break  # fewer send less
        return found

    def _left(self, mesh: Mapping[str, int], way: Way) -> float:
        """Bytes of a device beside parameters, optimizer state and layers' gradients, split as far
        as may be."""
        data, size, others = mesh[MeshAxis.DATA], self._target.size, self._moments + self._gradients
        if way.stored:
            return self._room - (self._parameters + others) * data / size
        whole = data * mesh[MeshAxis.FSDP]
        return self._room - (self._parameters * whole + others) / size

    def _least(self, room: float) -> float:
        """Seconds of layers that keep so much of a row at most, infinite where none keep so
        little: on the line between the two policies around it."""
        known = self._policies
        if not known:
            return 0.0
        at = bisect.bisect_right(known, (room, math.inf))
        if at == 0:
            return math.inf
        kept, seconds = known[at - 1]
        if at == len(known):
            return seconds
        more, fewer = known[at]
        return seconds - (seconds - fewer) * (room - kept) / (more - kept)

    def _of(
        self, mesh: Mapping[str, int], way: Way, rows: int, microbatches: int, layers: float
    ) -> float:
        count, along = mesh[MeshAxis.STAGE], mesh[MeshAxis.RING] * mesh[MeshAxis.ULYSSES]
        stages = Stages(count=count, chunks=way.chunks)
        turns = stages.turns(microbatches)
        tokens = rows * self._profile.tokens / along
        waited = beside = 0.0
        for (axis, hidden), sent in self._sent.get(self._key(mesh), {}).items():
            seconds = turns * tokens / count * sent / self._rate(mesh, MeshAxis(axis))
            waited, beside = (waited, beside + seconds) if hidden else (waited + seconds, beside)
        if way.form is not None:
            for axis, sent in way.form.sent.items():
                waited += turns * tokens / count * sent / self._rate(mesh, MeshAxis(axis))
        if count > 1:
            held = tokens / mesh[MeshAxis.TENSOR] * self._profile.width * self._wide
            sent = 2 * stages.runs(microbatches) / microbatches + 2
            waited += sent * held / self._rate(mesh, MeshAxis.STAGE)
        gathers, states = self._weights(mesh, way, turns * microbatches)
        return Seconds(
            compute=turns * layers + self._ends,
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
        numbers, experts = self._numbers / inner, self._experts / inner
        if (
            way.form is not None and way.form.experts.dispatch == WEIGHTS
        ):  # they are weights like others
            numbers, experts = numbers + experts, 0.0
        else:
            experts /= expert * along
        sums, times = 1.0 if way.once else runs, self._collectives / mesh[MeshAxis.STAGE]
        if not way.stored:
            axis = MeshAxis.DATA if data > 1 else MeshAxis.FSDP
            link, ways = self._link(mesh, axis), data * fsdp * expert
            one = (1 - 1 / ways) / link.bytes_per_s
            theirs = (1 - 1 / (data * fsdp)) / link.bytes_per_s
            sent = one * numbers + theirs * experts
            hops = sums * (ways - 1) * times * link.latency_s
            return sums * self._summed * sent + hops, self._at_rest * sent
        gathers, ways = 1.0 if way.whole else 2 * runs, fsdp * expert
        if self._embed % (ways * along) == 0:
            ways *= along  # devices that share a sequence share storage too
        own = (1 - 1 / ways) * numbers + (1 - 1 / fsdp) * experts
        sent = (gathers * self._wide + sums * self._summed) * own
        link = self._link(mesh, MeshAxis.FSDP if fsdp * expert > 1 else MeshAxis.RING)
        found = sent / link.bytes_per_s + (gathers + sums) * (ways - 1) * times * link.latency_s
        if data > 1:
            held = self._summed * (numbers / fsdp / expert / along + experts / fsdp)
            found += 2 * (1 - 1 / data) * sums * held / self._rate(mesh, MeshAxis.DATA)
        return found, 0.0

    def _rate(self, mesh: Mapping[str, int], axis: MeshAxis) -> float:
        return self._link(mesh, axis).bytes_per_s

    def _link(self, mesh: Mapping[str, int], axis: MeshAxis) -> Link:
        """The slowest in a ring along an axis."""
        span = math.prod(mesh[inner] for inner in AXES[AXES.index(axis) :])
        return self._within if self._target.gpus % span == 0 else self._between

    def learn(self, mesh: Mapping[str, int], on_mesh: OnMesh) -> None:
        """What layers of such a mesh send for a token, but to its experts: that is known."""
        key = self._key(mesh)
        if key not in self._sent:
            found, one = on_mesh.least_sent(), on_mesh.tokens(1)
            for kind in self._profile.kinds:
                held = one.held / one.inside * kind.tokens / self._profile.tokens
                for sent in experts_sent(self._profile, on_mesh.parts, kind, held):
                    outer = (min(sent.axes, key=MESH_AXES.index), sent.hidden)
                    found[outer] = max(0.0, found[outer] - kind.calls * sent.bytes)
            self._sent[key] = found

    def _rows(self, mesh: Mapping[str, int]) -> int:
        return self._profile.rows // math.prod(mesh[axis] for axis in _TOKENS)

    def _key(self, mesh: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(mesh[axis] for axis in _WITHIN)


@functools.cache
def divisors(number: int) -> tuple[int, ...]:
    """All of them, the least first."""
    return tuple(n for n in range(1, number + 1) if number % n == 0)
