"""One layout of stages across islands: its fastest microbatch, policy and shares of the layers."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

from colossax.aot import Link, Target
from colossax.config import BatchConfig, LossConfig, MeshAxis, PipelineConfig, Plan, Segment
from colossax.planner.searching.bounds import divisors
from colossax.planner.searching.island_costs import OnIsland
from colossax.planner.searching.memory import Bytes
from colossax.planner.searching.predicting import policies_of
from colossax.planner.searching.search import remat_of
from colossax.planner.searching.seconds import Seconds
from colossax.planner.searching.sends import Tokens
from colossax.planner.searching.sent import Sent
from colossax.planner.searching.sharing import StageCost, share_layers, step_seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class IslandPrediction:
    """Of one plan; see `Prediction`.

    Attributes:
        bytes: Of a device of the stage with least room left.
        stages: Bytes of a device of each stage.
        seconds: Of a step.
        stage_s: Of a microbatch on each stage, forward and backward.
        hop_s: Of what goes from stage to stage, where that takes longest.
        even_s: Where layers were shared evenly; infinite where those would not fit.
        microbatches: A step.
        host: Bytes of the host; none is used, nor of what is next.
        file: Of a file.
        through: Of the host, for its records.
    """

    bytes: Bytes
    stages: tuple[float, ...]
    seconds: Seconds
    stage_s: tuple[float, ...]
    hop_s: float
    even_s: float
    microbatches: int
    host: float = 0.0
    file: float = 0.0
    through: float = 0.0

    @property
    def sent_in_a_step(self) -> tuple[Sent, ...]:
        """Is known of compiled programs alone."""
        return ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class IslandCandidate:
    """A plan and what formulas say of it; see `Candidate`."""

    words: str
    plan: Plan
    predicted: IslandPrediction

    @property
    def label(self) -> str:
        """Mesh and `words`."""
        sizes = [f"{axis}={n}" for axis, n in self.plan.mesh.items() if n > 1]
        return " ".join([*sizes, self.words])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Stages across islands, and a mesh within each.

    Attributes:
        order: Island of each stage.
        positions: Of each stage, which of the target's devices it has, as `pipeline.order`.
        each: What the devices of a stage do, by island.
        hops: From each stage to the next.
        base: The plan within a stage.
        words: Of its rules.
        target: All islands.
    """

    order: tuple[int, ...]
    positions: tuple[int, ...]
    each: Mapping[int, OnIsland]
    hops: tuple[Link, ...]
    base: Plan
    words: str
    target: Target

    def best(
        self, rooms: Sequence[float], *, chunks: int, off: Sequence[float] | None = None
    ) -> tuple[IslandCandidate | None, int]:
        """The fastest microbatch and policy with layers shared for it, and how many were tried.

        Args:
            rooms: Bytes of a device of each island.
            chunks: Of the vocabulary.
            off: Of each stage, by how much its programs need more than formulas say.
        """
        found, tried = None, 0
        some = self.each[0]
        count = [-1] if some.profile.whole else divisors(some.rows)
        for rows in count:
            rows = some.rows if rows < 0 else rows
            ends = {at: mesh.of_ends(some.tokens(rows)) for at, mesh in self.each.items()}
            for names in policies_of(some.profile):
                tried += 1
                one = self._candidate(rows, names, ends, rooms, chunks, off)
                if one is not None and (
                    found is None or one.predicted.seconds.total < found.predicted.seconds.total
                ):
                    found = one
        return found, tried

    def _candidate(
        self,
        rows: int,
        names: frozenset[str],
        of_ends: Mapping[int, Seconds],
        rooms: Sequence[float],
        chunks: int,
        off: Sequence[float] | None,
    ) -> IslandCandidate | None:
        some, stages = self.each[0], range(len(self.order))
        microbatches, tokens = some.rows // rows, some.tokens(rows)
        of_layer = {at: mesh.of_layer(names, tokens) for at, mesh in self.each.items()}
        needs = [self._bytes(at, names, tokens, microbatches, chunks) for at in stages]
        costs = []
        for at, (island, (fixed, layer)) in enumerate(zip(self.order, needs, strict=True)):
            room = rooms[island] - (0.0 if off is None else off[at]) - fixed.total
            costs.append(
                StageCost(
                    layer_s=of_layer[island].total,
                    rest_s=of_ends[island].total if at == stages[-1] else 0.0,
                    most=max(0, math.floor(room / layer.total)),
                )
            )
        cuts = share_layers(costs, some.profile.kinds[0].calls)
        if cuts is None:
            return None
        compute = self._compute(of_layer, of_ends, cuts, microbatches)
        sizes = [_sum(fixed, layer, n) for (fixed, layer), n in zip(needs, cuts, strict=True)]
        return IslandCandidate(
            words=f"{self.words}, {self._shared(cuts)}",
            plan=self._plan(rows, names, chunks, cuts),
            predicted=self._predicted(costs, cuts, sizes, compute, rooms, self._hops(tokens), rows),
        )

    def _predicted(
        self,
        costs: Sequence[StageCost],
        cuts: Sequence[int],
        sizes: Sequence[Bytes],
        compute: float,
        rooms: Sequence[float],
        hops: Sequence[float],
        rows: int,
    ) -> IslandPrediction:
        layers, microbatches = sum(cuts), self.each[0].rows // rows
        stage_s = [one.seconds(n) for one, n in zip(costs, cuts, strict=True)]
        total = step_seconds(stage_s, hops, microbatches)
        update = max(
            self.each[island].update_s(n / layers, microbatches)
            for island, n in zip(self.order, cuts, strict=True)
        )
        even = _even(costs, layers)
        even_s = math.inf if even is None else step_seconds(even, hops, microbatches) + update
        pairs = zip(sizes, self.order, strict=True)
        fullest, _ = max(pairs, key=lambda one: one[0].total / rooms[one[1]])
        return IslandPrediction(
            bytes=fullest,
            stages=tuple(one.total for one in sizes),
            seconds=Seconds(
                compute=compute, waited=max(0.0, total - compute), beside=0.0, memory=update
            ),
            stage_s=tuple(stage_s),
            hop_s=max(hops, default=0.0),
            even_s=even_s,
            microbatches=microbatches,
        )

    def _bytes(
        self, at: int, names: frozenset[str], tokens: Tokens, microbatches: int, chunks: int
    ) -> tuple[Bytes, Bytes]:
        """Of a stage without layers, and of each layer."""
        stages, mesh = len(self.order), self.each[self.order[at]]
        held, flying, several = mesh.held, min(stages - at, microbatches), microbatches > 1
        ends = [held.ends[end] for end, there in ((0, at == 0), (1, at == stages - 1)) if there]
        stream = tokens.held * mesh.stored.stream
        fixed = Bytes(
            states=sum((one[0] for one in ends), 0.0),
            gradients=several * sum((one[1] for one in ends), 0.0),
            kept=2 * stream,
            working=mesh.working(tokens, chunks, last=at == stages - 1),
        )
        layer = Bytes(
            states=held.layer[0],
            gradients=(1 + several) * held.layer[1],
            kept=flying * mesh.kept(0, names, tokens),
            working=0.0,
        )
        return fixed, layer

    def _hops(self, tokens: Tokens) -> list[float]:
        sent = tokens.held * self.each[0].stored.stream
        return [link.latency_s + sent / link.bytes_per_s for link in self.hops]

    def _compute(
        self,
        of_layer: Mapping[int, Seconds],
        of_ends: Mapping[int, Seconds],
        cuts: Sequence[int],
        microbatches: int,
    ) -> float:
        """Seconds that the busiest stage multiplies; the others as the first microbatch passes."""
        each = [n * of_layer[island].compute for island, n in zip(self.order, cuts, strict=True)]
        each[-1] += of_ends[self.order[-1]].compute
        return sum(each) + (microbatches - 1) * max(each)

    def _shared(self, cuts: Sequence[int]) -> str:
        """Layers of each stage, for people."""
        told, at = [], 0
        for island, same in itertools.groupby(self.order):
            count = len(list(same))
            each = " + ".join(map(str, cuts[at : at + count]))
            told.append(f"{each} {'' if at else 'layers '}on {self.target.islands[island].gpu.key}")
            at += count
        return ", ".join(told)

    def _plan(self, rows: int, names: frozenset[str], chunks: int, cuts: tuple[int, ...]) -> Plan:
        sizes = {axis: n for axis, n in self.base.mesh.items() if n > 1}
        moved = self.positions != tuple(range(len(self.order)))
        return self.base.replace(
            mesh={MeshAxis.STAGE.value: len(self.order), **sizes},
            pipeline=PipelineConfig(cuts=cuts, order=self.positions if moved else None),
            batch=BatchConfig(microbatch=rows),
            segments=(Segment(remat=remat_of(names)),),
            loss=LossConfig(vocab_chunks=chunks),
        )


def _even(costs: Sequence[StageCost], layers: int) -> list[float] | None:
    each, over = divmod(layers, len(costs))
    counts = [each + (at < over) for at in range(len(costs))]
    if any(n > one.most for n, one in zip(counts, costs, strict=True)):
        return None
    return [one.seconds(n) for n, one in zip(counts, costs, strict=True)]


def _sum(fixed: Bytes, layer: Bytes, count: int) -> Bytes:
    return Bytes(
        states=fixed.states + count * layer.states,
        gradients=fixed.gradients + count * layer.gradients,
        kept=fixed.kept + count * layer.kept,
        working=fixed.working + count * layer.working,
    )
