"""Seconds that a way to run needs at least, so that few of many have to be scored.

What no plan does without: matmuls forward and backward on all devices, recomputed as little as
memory lets any mix of policies, as often as stages run them; weights of layers gathered and their
gradients summed so often; what stages hand on; and what layers send for their tokens, as it was
found on a mesh that splits them likewise.
"""

import functools
import heapq
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from colossax.aot import Link, Target, hops
from colossax.config import MeshAxis, Plan
from colossax.errors import PlanError
from colossax.planner.profiling import ModelProfile, bare
from colossax.planner.searching.forms import Form, Forms
from colossax.planner.searching.memory import working_of
from colossax.planner.searching.meshes import AXES, Way, limits_of, meshes, ruled
from colossax.planner.searching.parts import Parts, abstract
from colossax.planner.searching.predicting import LeastSent, least_seconds, least_sent
from colossax.planner.searching.seconds import Rates, with_sends
from colossax.planner.searching.stages import Stages
from colossax.planner.searching.terms import OfTokens, OfWeights, Terms, columns_of
from colossax.planner.searching.touched import touched_by_microbatch, updated_bytes

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


class _Every(NamedTuple):
    """Each number of microbatches that a stage's rows may be cut into, as arrays.

    Attributes:
        count: Of them.
        turns: See `Stages`.
        sends: Likewise, of each microbatch.
        slots: See `Stages`; over the share of the layers that each holds.
    """

    count: np.ndarray
    turns: np.ndarray
    sends: np.ndarray
    slots: np.ndarray


class _Sizes(NamedTuple):
    """A mesh.

    Attributes:
        mesh: Devices by axis.
        rows: Of a global batch, on each group of devices that share rows.
        links: By axis the slowest in a ring along it.
    """

    mesh: Mapping[str, int]
    rows: int
    links: Mapping[str, Link]


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
        self._sent: dict[tuple[int | str, ...], LeastSent] = {}
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
        self._adds = np.dtype(plan.precision.accumulation).itemsize
        reduced = (plan.precision.reduction or plan.precision.compute, plan.precision.accumulation)
        self._summed = min(np.dtype(each).itemsize for each in reduced)
        self._at_rest = np.dtype(plan.precision.params).itemsize
        self._parameters = self._moments = self._gradients = self._layers = self._updated = 0.0
        for info, moment, learns in zip(
            profile.infos, profile.moments, profile.learns, strict=True
        ):
            numbers, at_rest = math.prod(info.shape), info.at_rest(plan.precision.params).itemsize
            self._parameters += numbers * at_rest
            self._moments += numbers * moment
            self._updated += learns * updated_bytes(moment, at_rest, self._adds) * numbers
            if info.total_layers is not None:
                self._gradients += learns * self._adds * numbers
                self._layers += numbers * (len(info.shape) > 2)
        self._working = working_of(profile, np.dtype(plan.precision.compute).itemsize)
        self._room, self._node, self._size = room, target.gpus, target.size
        self._policies, self._ends = least_seconds(profile, target, rates)

    def ordered(self, pinned: Mapping[str, int]) -> list[tuple[float, dict[str, int], Way]]:
        """All ways with seconds that they need at least, the fewest first."""
        alike: dict[tuple[int, int, int], list[tuple[dict[str, int], Way, Terms]]] = {}
        for mesh in meshes(self._target, self._limits, pinned):
            tokens: dict[Form | None, OfTokens] = {}
            sizes = self._sizes(mesh)
            for way in ruled(self._plan, mesh, self._limits, pinned, self._forms):
                if way.form not in tokens:
                    tokens[way.form] = self._tokens(sizes, way)
                some = alike.setdefault((mesh[MeshAxis.STAGE], way.chunks, sizes.rows), [])
                some.append((mesh, way, self._terms(sizes, way, tokens[way.form])))
        every: list[tuple[float, dict[str, int], Way]] = []
        for (stages, chunks, rows), some in alike.items():
            each = _every(Stages(count=stages, chunks=chunks), rows)
            found = self._of(each, rows, [terms for _, _, terms in some])
            every += [
                (float(seconds), mesh, way)
                for seconds, (mesh, way, _) in zip(found, some, strict=True)
            ]
        return sorted(every, key=lambda one: one[0])

    def _terms(self, sizes: _Sizes, way: Way, tokens: OfTokens) -> Terms:
        mesh = sizes.mesh
        updates, adds = self._touched(mesh, way)
        return Terms(
            tokens=tokens,
            weights=self._weights(sizes, way),
            whole=way.whole,
            once=way.once,
            left=self._left(mesh, way),
            inner=mesh[MeshAxis.RING] * mesh[MeshAxis.ULYSSES] * mesh[MeshAxis.TENSOR],
            updates=updates,
            adds=adds,
        )

    def _of(self, each: _Every, rows: int, some: Sequence[Terms]) -> np.ndarray:
        """Of ways with as many stages, chunks and rows: with the number of microbatches that is
        best for it, of those whose layers' inputs fit; infinite where none do."""
        one = columns_of(some)  # and numbers of microbatches in a row
        tokens, weights, turns, count = one.tokens, one.weights, each.turns, each.count
        held = rows / count / one.inner
        layers = self._least((one.left - held * self._working) / each.slots / held)
        runs, several = turns * count, count > 1
        waited = turns * (tokens.waits + tokens.calls * count) + each.sends * tokens.passed
        waited = waited + tokens.ends + weights.states + one.once * several * weights.sums
        beside = turns * (tokens.beside + tokens.calls_beside * count)
        beside = beside + weights.gathers * np.where(one.whole, 1.0, 2 * runs)
        beside = beside + weights.sums * np.where(one.once, 1.0 - several, runs)
        compute = turns * layers + self._ends
        sent = with_sends(compute, waited, beside, self._rates.hiding, self._rates.slowing)
        return np.min(sent + one.updates + several * count * one.adds, axis=1)

    def _left(self, mesh: Mapping[str, int], way: Way) -> float:
        """Bytes of a device beside parameters, optimizer state and layers' gradients, split as far
        as may be."""
        data, size, others = mesh[MeshAxis.DATA], self._size, self._moments + self._gradients
        apart = self._apart(mesh)
        if way.stored:
            own = (self._parameters + others) * data / size
            return self._room - own - way.whole * self._wide * self._layers / apart
        held = self._parameters + way.once * self._gradients
        others -= way.once * self._gradients
        return self._room - held / apart - others / size

    def _apart(self, mesh: Mapping[str, int]) -> int:
        """Of weights as they are multiplied the parts at most."""
        own = mesh[MeshAxis.TENSOR] * mesh[MeshAxis.STAGE] * mesh[MeshAxis.EXPERT]
        # Experts may also be split over devices that share a sequence.
        return own * mesh[MeshAxis.RING] * mesh[MeshAxis.ULYSSES] if self._experts else own

    def _touched(self, mesh: Mapping[str, int], way: Way) -> tuple[float, float]:
        """Seconds of updates, and of adding up a microbatch's gradients; see `touched`."""
        own = (mesh[MeshAxis.DATA] if way.stored else 1) / self._size
        summed = 1 / self._apart(mesh) if way.once else own
        each = touched_by_microbatch(summed * self._gradients, 2)
        return own * self._updated / self._rates.memory, each / self._rates.memory

    def _least(self, room: np.ndarray) -> np.ndarray:
        """Seconds of layers that keep so much of a row at most, infinite where none keep so
        little: on the line between the two policies around it."""
        if not self._policies:
            return np.zeros_like(room)
        kept, seconds = zip(*self._policies, strict=True)
        return np.interp(room, kept, seconds, left=math.inf)

    def _tokens(self, sizes: _Sizes, way: Way) -> OfTokens:
        """What is sent for a step's tokens, which depends on no more of a way than its form."""
        mesh, links = sizes.mesh, sizes.links
        along, t = mesh[MeshAxis.RING] * mesh[MeshAxis.ULYSSES], mesh[MeshAxis.TENSOR]
        tokens, count = sizes.rows * self._profile.tokens / along, mesh[MeshAxis.STAGE]
        turns, calls, passed, ends = [0.0, 0.0], [0.0, 0.0], 0.0, 0.0
        for (axis, hidden), (sent, each) in self._layers_sent(mesh, way).items():
            link = links[axis]
            turns[hidden] += tokens / count * sent / link.bytes_per_s
            calls[hidden] += each / count * link.latency_s
        held = tokens / t * self._profile.width * self._wide
        if t > 1 and self._profile.kinds:
            sent = (5 + 2 / count) * (t - 1) * held
            ends += sent / links[MeshAxis.TENSOR].bytes_per_s
        if count > 1:
            link = links[MeshAxis.STAGE]
            passed = 2 * held / link.bytes_per_s
            part = (count - 1) / count
            to_all = 2 if count == self._size else 4 * part
            both = part * (1 + 2 * t) if self._profile.vocab else 0.0
            ends += (to_all + both) * held / link.bytes_per_s
        return OfTokens(turns[0], turns[1], calls[0], calls[1], passed, ends)

    def _layers_sent(self, mesh: Mapping[str, int], way: Way) -> LeastSent:
        """Of meshes that split tokens' matmuls alike, with one form for experts, found on the
        first of them."""
        form = "" if way.form is None else way.form.words
        key = (form, *(mesh[axis] for axis in _WITHIN))
        if key not in self._sent:
            try:
                parts = Parts(abstract(way.plan(), self._size))
                self._sent[key] = least_sent(self._profile, parts)
            except PlanError:
                self._sent[key] = {}
        return self._sent[key]

    def _weights(self, sizes: _Sizes, way: Way) -> OfWeights:
        """Of gathers of weights and sums of gradients; of new parameters."""
        mesh, links = sizes.mesh, sizes.links
        data, fsdp, expert = (mesh[axis] for axis in _TOKENS)
        along = mesh[MeshAxis.RING] * mesh[MeshAxis.ULYSSES]
        inner = mesh[MeshAxis.TENSOR] * mesh[MeshAxis.STAGE]
        numbers, experts = self._numbers / inner, self._experts / inner / expert / along
        if way.form is not None and way.form.gathers:  # they are weights like others
            numbers, experts = numbers + self._experts / inner, 0.0
        times = self._collectives / mesh[MeshAxis.STAGE]
        if not way.stored:
            axis = MeshAxis.DATA if data > 1 else MeshAxis.FSDP
            link, ways = links[axis], data * fsdp * expert
            one = (1 - 1 / ways) / link.bytes_per_s
            theirs = (1 - 1 / (data * fsdp)) / link.bytes_per_s
            sent = one * numbers + theirs * experts
            wide = self._adds if way.once else self._summed
            sums = wide * sent + hops("all-reduce", ways) * times * link.latency_s
            return OfWeights(0.0, sums, self._at_rest * sent)
        ways = fsdp * expert
        if self._embed % (ways * along) == 0:
            ways *= along  # devices that share a sequence share storage too
        own = (1 - 1 / ways) * numbers + (1 - 1 / fsdp) * experts
        link = links[MeshAxis.FSDP if fsdp * expert > 1 else MeshAxis.RING]
        latencies = hops("all-gather", ways) * times * link.latency_s
        gathers, sums = (wide * own / link.bytes_per_s for wide in (self._wide, self._summed))
        if data > 1:
            held = self._summed * (numbers / fsdp / expert / along + experts / fsdp)
            sums += 2 * (1 - 1 / data) * held / links[MeshAxis.DATA].bytes_per_s
        return OfWeights(gathers + latencies, sums + latencies, 0.0)

    def _sizes(self, mesh: Mapping[str, int]) -> _Sizes:
        links, span = dict[str, Link](), 1
        for axis in reversed(AXES):
            span *= mesh[axis]
            links[axis] = self._within if self._node % span == 0 else self._between
        rows = self._profile.rows // math.prod(mesh[axis] for axis in _TOKENS)
        return _Sizes(mesh, rows, links)


@functools.cache
def _every(stages: Stages, rows: int) -> _Every:
    counts = divisors(rows)
    return _Every(
        count=np.array(counts),
        turns=np.array([stages.turns(one) for one in counts]),
        sends=np.array([stages.sends(one) / one for one in counts]),
        slots=np.array([stages.slots(one) / stages.share for one in counts]),
    )


@functools.cache
def divisors(number: int) -> tuple[int, ...]:
    """All of them, the least first."""
    return tuple(n for n in range(1, number + 1) if number % n == 0)
