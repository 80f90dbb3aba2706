"""What a model on a mesh needs and takes, by formula alone."""

import dataclasses
from collections.abc import Sequence

from colossax.aot import Target
from colossax.config import MESH_AXES, MeshAxis, Plan
from colossax.errors import PlanError
from colossax.planner.profiling import LayerKind, ModelProfile
from colossax.planner.searching.memory import Bytes, Stored, bytes_of, kept_bytes, stored
from colossax.planner.searching.parts import Choices, Parts, abstract
from colossax.planner.searching.seconds import (
    Costs,
    Rates,
    Seconds,
    collectives_seconds,
    hops_of,
    rates_of,
)
from colossax.planner.searching.sends import (
    Tokens,
    layer_sent,
    states_sent,
    tokens_sent,
    weights_sent,
    widths,
)
from colossax.planner.searching.sent import Sent, joined, times
from colossax.planner.searching.stages import stages_of, stages_sent
from colossax.planner.searching.touched import touched_by_microbatch, touched_by_step
from colossax.sharding import activation_axes, batch_axes, seq_axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """Of one plan on one target.

    Attributes:
        bytes: Of a device.
        seconds: Of a step.
        sent: In a microbatch.
        sent_once: In a step, beside.
        microbatches: A step.
        host: Bytes of the host, for the device.
        moved: Bytes of a step to the device and to the host.
        file: Of the file that layers' optimizer state lies in, for the device.
        through: Of the host, for the device, that its records are read to and written from.
    """

    bytes: Bytes
    seconds: Seconds
    sent: tuple[Sent, ...]
    sent_once: tuple[Sent, ...]
    microbatches: int
    host: float = 0.0
    moved: tuple[float, float] = (0.0, 0.0)
    file: float = 0.0
    through: float = 0.0

    @property
    def sent_in_a_step(self) -> tuple[Sent, ...]:
        """What a device sends, one of each kind along the same axes, hidden or not."""
        every = [*times(self.sent, self.microbatches), *self.sent_once]
        return joined(one._replace(hidden=False) for one in every if one.bytes)


Policies = Sequence[Sequence[tuple[int, frozenset[str]]]]
"""Of each kind of layer, how many keep which names."""


class OnMesh:
    """A model on a mesh: what all batches and policies share.

    Attributes:
        parts: Plan and mesh.
        rows: Of a global batch, on each group of devices that share rows.
        rates: Of devices and links.
        tensor: Devices along that axis.
    """

    def __init__(
        self,
        profile: ModelProfile,
        plan: Plan,
        target: Target,
        choices: Choices | None = None,
        rates: Rates | None = None,
    ):
        """Args:
            profile: The model.
            plan: With its mesh.
            target: Where.
            choices: Of the plan's rules, where many meshes share them.
            rates: That were measured; default what is assumed of the target.

        Raises:
            PlanError: The mesh does not divide the model or its batch.
        """
        self.profile, self.target = profile, target
        self.parts = Parts(abstract(plan, target.size), choices)
        bound = self.parts.bound
        ways, along = self.parts.size(tuple(batch_axes(bound))), self.parts.size(seq_axes(bound))
        self.rows, rest = divmod(profile.rows, ways)
        if rest or not self.rows:
            raise PlanError(f"{profile.rows} rows cannot be shared by {ways} groups of devices")
        if profile.tokens % along:
            raise PlanError(f"{profile.tokens} tokens cannot be shared by {along} devices")
        self.stored: Stored = stored(profile, self.parts)
        self.stages = stages_of(plan, self.parts)
        self.tensor = self.parts.size((MeshAxis.TENSOR.value,))
        self._weights = weights_sent(profile, self.parts)
        self._states = states_sent(profile, self.parts)
        self._touched = touched_by_step(profile, self.parts)
        self.rates = rates_of(target, bound.plan) if rates is None else rates
        self._widths = [widths(profile, self.parts, kind) for kind in profile.kinds]
        self._flops = [self._of_maps(kind) for kind in profile.kinds]
        self._compute: dict[tuple[int, frozenset[str]], float] = {}
        self._waited: dict[tuple[int, frozenset[str]], float] = {}
        self._costs: Costs = {}

    def tokens(self, rows: int) -> Tokens:
        """Of a microbatch of so many rows of each device."""
        return tokens_of(self.profile, self.parts, rows)

    def kept(self, number: int, names: frozenset[str], tokens: Tokens) -> float:
        """Bytes that one call of a kind of layer keeps under a policy."""
        kind = self.profile.kinds[number]
        return kept_bytes(kind, names, self.tensor, tokens, self.profile.tokens)

    def compute(self, number: int, names: frozenset[str], tokens: Tokens) -> float:
        """Seconds of one call of a kind of layer, forward and backward."""
        key = (number, names)
        if key not in self._compute:
            self._compute[key] = self._of_a_row(number, names)
        return self._compute[key] * tokens.inside / self.profile.tokens

    def _of_a_row(self, number: int, names: frozenset[str]) -> float:
        """Seconds of one call for the tokens that were traced."""
        kind = self.profile.kinds[number]
        again, _ = kind.traced.again[names]
        once, flops = self._flops[number]
        maps = once + sum(flops[at] for at in again)
        pairs = self.profile.pair_flops / sum(one.calls for one in self.profile.kinds)
        return (
            maps / self.rates.matmuls
            + _passes(kind, names) * pairs / self.tensor / self.rates.pairs
        )

    def layer_seconds(self, number: int, names: frozenset[str], tokens: Tokens) -> float:
        """Of one call of a kind of layer, with what its matmuls wait for."""
        key = (number, names)
        if key not in self._waited:
            kind, one_row = self.profile.kinds[number], self.tokens(1)
            given = self.profile, self.parts, kind, self._widths[number], one_row, names
            waited, _ = self._seconds(layer_sent(*given))
            self._waited[key] = waited / one_row.inside
        return self.compute(number, names, tokens) + self._waited[key] * tokens.inside

    def ends(self, tokens: Tokens) -> float:
        """Seconds of what stands beside the layers."""
        shared = self.tensor * (self.stages.count if self.profile.vocab else 1)
        flops = (
            self.profile.ends_passes
            * self.profile.ends_flops
            / shared
            * tokens.inside
            / self.profile.tokens
        )
        return flops / self.rates.matmuls

    def bytes(self, rows: int, kept: float, vocab_chunks: int, named: float = 0.0) -> Bytes:
        """Of a device.

        Args:
            rows: Of a microbatch.
            kept: What a chunk's layers keep of it.
            vocab_chunks: Of the loss.
            named: Of `kept` all but the layers' inputs. Stages take it out of its slot whole.
        """
        tokens, microbatches = self.tokens(rows), self.rows // rows
        return bytes_of(
            self.stored,
            self.tensor,
            tokens,
            self.stages.slots(microbatches) * kept + (self.stages.count > 1) * named,
            vocab_chunks,
            several=microbatches > 1,
            stages=self.stages,
        )

    def predicted(self, rows: int, policies: Policies, vocab_chunks: int) -> Prediction:
        """Of microbatches of so many rows, with layers of each kind under these policies: those of
        one chunk where there are stages."""
        tokens, microbatches = self.tokens(rows), self.rows // rows
        runs = self.stages.runs(microbatches) / microbatches
        kept = self.profile.kept * tokens.inside / self.profile.tokens
        named = compute = 0.0
        for number, each in enumerate(policies):
            inputs = self.kept(number, frozenset(), tokens)
            for count, names in each:
                own = self.kept(number, names, tokens)
                kept += count * own
                named += count * (own - inputs)
                compute += count * self.compute(number, names, tokens)
        lookups = self.stages.lookups(microbatches)
        given = self.profile, self.parts, self._widths, tokens, policies, lookups
        layers, ends = tokens_sent(*given)
        gathered, once = self._weights_sent(microbatches)
        sent = (
            *times(layers, runs),
            *ends,
            *gathered,
            *stages_sent(self.profile, self.parts, self.stages, tokens, microbatches),
        )
        found, in_the_end = self._seconds(sent), self._seconds(once)
        waited, beside = (
            microbatches * each + one for each, one in zip(found, in_the_end, strict=True)
        )
        compute = runs * compute + self.ends(tokens)
        return Prediction(
            bytes=self.bytes(rows, kept, vocab_chunks, named),
            seconds=Seconds(
                compute=microbatches * compute,
                waited=waited,
                beside=beside,
                memory=self._memory(microbatches),
                fixed=self._fixed(microbatches),
                hiding=self.rates.hiding,
                slowing=self.rates.slowing,
            ),
            sent=sent,
            sent_once=once,
            microbatches=microbatches,
        )

    def _weights_sent(self, microbatches: int) -> tuple[list[Sent], tuple[Sent, ...]]:
        """Of weights and gradients: what each microbatch sends on average, and a step beside."""
        weights, stages = self._weights, self.stages
        by_microbatch, once = list(weights.outside), list(self._states)
        turns = stages.turns(microbatches) / stages.count
        own = times(weights.gathered, turns)
        if not stages.whole:
            by_microbatch += own
        elif stages.once:
            once += times(weights.gathered, 0.5 / stages.count) + by_microbatch
            by_microbatch = []
        else:
            once += times(weights.gathered, 0.5 / stages.count)
        if stages.once and microbatches > 1:
            sums = times(weights.summed, 1 / stages.count) + list(weights.outside_summed)
            once += [one._replace(hidden=False) for one in sums]  # there is nothing beside
        else:
            by_microbatch += times(weights.summed, turns) + list(weights.outside_summed)
        return by_microbatch, tuple(once)

    def _seconds(self, sent: Sequence[Sent]) -> tuple[float, float]:
        return collectives_seconds(self.target, self.parts, sent, self.rates, self._costs)

    def _memory(self, microbatches: int) -> float:
        each = touched_by_microbatch(self.stored.gradients, microbatches)
        return (self._touched + microbatches * each) / self.rates.memory

    def _fixed(self, microbatches: int) -> float:
        calls = sum(kind.calls for kind in self.profile.kinds)
        calls *= self.stages.turns(microbatches) / self.stages.count
        rates = self.rates
        return microbatches * (calls * rates.call_s + rates.microbatch_s) + rates.step_s

    def _of_maps(self, kind: LayerKind) -> tuple[float, list[float]]:
        """A device's FLOPs of a call's maps, forward and backward, and forward alone of each."""
        flops, total = [], 0.0
        for one in kind.traced.maps:
            info = self.profile.infos[kind.leaves[one.leaf]]
            axes = self.parts.own("weights", info.dims, info.shape)
            # Devices that hold the same tokens share it.
            part = self.parts.size([axis for axis in axes if axis not in self.parts.split])
            flops.append(one.flops / part)
            total += (2 + self.profile.learns[kind.leaves[one.leaf]]) * flops[-1]
        return total, flops


def tokens_of(profile: ModelProfile, parts: Parts, rows: int) -> Tokens:
    """Of a microbatch of so many rows of each device."""
    bound = parts.bound
    inside = rows * profile.tokens / parts.size(seq_axes(bound))
    splits = MeshAxis.TENSOR.value in activation_axes(bound, "seq:residual")
    return Tokens(inside=inside, held=inside / (parts.size((MeshAxis.TENSOR,)) if splits else 1))


def policies_of(profile: ModelProfile) -> list[frozenset[str]]:
    """Names that layers might keep, of which all kinds of layers know."""
    each = [set(kind.traced.again) for kind in profile.kinds]
    return sorted(set.intersection(*each), key=sorted) if each else []


LeastSent = dict[tuple[str, bool], tuple[float, float]]
"""See `least_sent`."""


def least_sent(profile: ModelProfile, parts: Parts) -> LeastSent:
    """Of all layers, by the outermost axis that it goes along and whether compute can hide it:
    bytes for a token of a device, and hops for a microbatch, of each the fewest that any policy
    has.

    Raises:
        PlanError: The mesh does not divide the model.
    """
    one_row, every = tokens_of(profile, parts, 1), policies_of(profile)
    wide = [widths(profile, parts, kind) for kind in profile.kinds]
    least: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for names in every:
        sums: LeastSent = {}
        for kind, split in zip(profile.kinds, wide, strict=True):
            for one in layer_sent(profile, parts, kind, split, one_row, names):
                key = (min(one.axes, key=MESH_AXES.index), one.hidden)
                sent, hops = sums.get(key, (0.0, 0.0))
                sent += kind.calls * one.bytes / one_row.inside
                sums[key] = sent, hops + kind.calls * hops_of(one, parts)
        for key, found in sums.items():
            least.setdefault(key, []).append(found)
    return {
        key: (min(one for one, _ in found), min(hops for _, hops in found))
        for key, found in least.items()
        if len(found) == len(every)
    }


def least_seconds(
    profile: ModelProfile, target: Target, rates: Rates
) -> tuple[list[tuple[float, float]], float]:
    """Of a step, whatever the mesh is, shared by all devices: layers' matmuls forward and backward
    under each policy that is on the lower hull of all, with the bytes that it keeps of a row, the
    least first; and what stands beside layers."""
    rows = profile.rows / target.size
    pairs = profile.pair_flops / max(1, sum(kind.calls for kind in profile.kinds)) / rates.pairs
    each = [set(kind.traced.again) for kind in profile.kinds]
    found = []
    for names in set.intersection(*each) if each else ():
        kept = seconds = 0.0
        for kind in profile.kinds:
            again, _ = kind.traced.again[names]
            maps = kind.traced.maps
            once = sum((2 + profile.learns[kind.leaves[one.leaf]]) * one.flops for one in maps)
            flops = once + sum(maps[at].flops for at in again)
            seconds += kind.calls * (flops / rates.matmuls + _passes(kind, names) * pairs)
            stays = (a.bytes for a in kind.traced.kept if a.name == "input" or a.name in names)
            kept += kind.calls * sum(stays, 0.0)
        found.append((float(kept), float(rows * seconds)))
    ends = profile.ends_passes * profile.ends_flops / rates.matmuls
    return _hull(found), float(rows * ends)


def _hull(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points that no mixture of two others is below, from the first to the lowest."""
    hull: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if hull and y >= hull[-1][1]:
            continue
        while len(hull) > 1:
            (x0, y0), (x1, y1) = hull[-2:]
            if (y1 - y0) * (x - x0) < (y - y0) * (x1 - x0):
                break
            hull.pop()
        hull.append((x, y))
    return hull


def _passes(kind: LayerKind, names: frozenset[str]) -> float:
    """Of attention: backward computes scores anew, five products where forward has two."""
    _, share = kind.traced.again[names]
    return 3.5 + (names in kind.traced.opaque or share > 0)
