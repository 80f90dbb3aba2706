"""A served model on a mesh, by formula: bytes of a device, and seconds of a step.

A step of an engine gives each seat a token; all seats are taken to be as long as they may be.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from colossax.aot import Target
from colossax.config import RING_AXES, MeshAxis, Plan
from colossax.inference.engine.pages import engine_plan
from colossax.inference.engine.sizing import PAGE_TOKENS
from colossax.planner.searching.parts import Parts, abstract
from colossax.planner.searching.seconds import Rates, collectives_seconds, rates_of
from colossax.planner.searching.sent import Sent
from colossax.planner.serving.sends import (
    head_sent,
    is_matrix,
    is_table,
    layers_sent,
    table_sent,
)
from colossax.planner.serving.served import CacheRow, ServedProfile
from colossax.typing import ParamInfo

LOGITS, OWN_LOGITS, SCORED, WIDTHS = 4.0, 1.0, 10.7, 4.0
"""Fitted to compiled programs: arrays of float32 logits that a step has at once, whole on each
device, and in its part of the vocabulary; in that part where prompts are scored too; and of each
token how often all that a layer's matrices make of it, in the compute dtype."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingBytes:
    """Of a device while an engine's larger step runs.

    Attributes:
        weights: As they are kept.
        cache: Pages for seats as long as they may be, and what is kept of a seat as a whole.
        seats: Tokens that seats have said, and which may come.
        working: What the step works with.
    """

    weights: float
    cache: float
    seats: float
    working: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.cache + self.seats + self.working


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSeconds:
    """From a token of each seat to the next.

    Attributes:
        reading: Weights and cache, from the device's memory.
        compute: Matmuls and attention; the longer of the two hides the other.
        waited: Collectives.
        handed: Hidden states, from stage to stage.
        idle: That seats wait for the fullest stage.
    """

    reading: float
    compute: float
    waited: float
    handed: float = 0.0
    idle: float = 0.0

    @property
    def total(self) -> float:
        """All that is not hidden."""
        return max(self.reading, self.compute) + self.waited + self.handed + self.idle

    @property
    def terms(self) -> dict[str, float]:
        """By name."""
        return dataclasses.asdict(self)


class OnServingMesh:
    """A model on one mesh.

    Attributes:
        plan: With its mesh.
        replicas: Engines side by side, along `data`.
        stages: Of each.
        parts: Of the devices of one stage of one replica.
    """

    def __init__(
        self, profile: ServedProfile, plan: Plan, target: Target, rates: Rates | None = None
    ):
        """Count what does not depend on seats.

        Args:
            profile: The model.
            plan: With its mesh.
            target: Of one node.
            rates: How fast it is; None: as assumed.

        Raises:
            PlanError: The mesh does not divide the model, or how fast the target is, is not known.
        """
        sizes = plan.mesh_sizes(target.size)
        self.plan, self._profile, self._target = plan, profile, target
        self.replicas, self.stages = sizes[MeshAxis.DATA], sizes[MeshAxis.STAGE]
        inner = {a: n for a, n in sizes.items() if a not in (MeshAxis.DATA, MeshAxis.STAGE)}
        mesh = {axis: n for axis, n in inner.items() if n > 1} or {"data": 1}
        self.parts = Parts(abstract(engine_plan(plan.replace(mesh=mesh)), math.prod(mesh.values())))
        self._rates = rates_of(target, self.parts.bound.plan) if rates is None else rates
        self._itemsize = np.dtype(plan.precision.compute).itemsize
        self._ring = self.parts.bound.size(RING_AXES)
        self._heads = self.parts.size(
            self.parts.axes("activations", ("heads",), (profile.config.heads,))
        )
        self._layers = [info for info in profile.infos if info.layer_count]
        self._first = [i for i in profile.infos if not i.layer_count and not i.behind]
        self._last = [i for i in profile.infos if not i.layer_count and i.behind]
        if not any("vocab" in info.dims for info in self._last):  # the table is the head too
            self._last += [info for info in self._first if "vocab" in info.dims]
        self._of_layers, self._of_first, self._of_last = map(
            self._held, (self._layers, self._first, self._last)
        )
        self._of_ends = self._held([info for info in profile.infos if not info.layer_count])

    @property
    def fullest(self) -> float:
        """Share of the layers that the fullest stage has."""
        layers = self._profile.config.layers
        return -(-layers // self.stages) / layers

    def bytes(self, seats: int) -> ServingBytes:
        """Of the fullest device.

        Args:
            seats: Of a replica; with stages shared by as many engines as those are.
        """
        profile, engines = self._profile, min(self.stages, seats)
        each = -(-seats // engines)
        pages = -(-each * profile.pages_a_seat // self._ring)
        rows = [(row, self._row_bytes(row)) for row in profile.rows]
        cache = sum(((each if row.of_seat else pages) * size for row, size in rows), 0.0)
        ends = self._of_ends if self.stages == 1 else max(self._of_first, self._of_last)
        return ServingBytes(
            weights=self.fullest * self._of_layers + ends,
            cache=engines * self.fullest * cache,
            seats=engines * each * (4 * (profile.context + 1) + profile.config.vocab / 8),
            working=self._working(each),
        )

    def seconds(self, seats: int) -> StepSeconds:
        """From one token of each seat to the next.

        Args:
            seats: See `bytes`.
        """
        engines = min(self.stages, seats)
        each = -(-seats // engines)
        layers, first, last = self._layers_step(each), self._first_step(each), self._last_step(each)
        found = StepSeconds(
            reading=layers.reading + first.reading + last.reading,
            compute=layers.compute + first.compute + last.compute,
            waited=layers.waited + first.waited + last.waited,
        )
        if self.stages == 1:
            return found
        node = self._rates.node
        size = each * self._profile.config.embed * self._itemsize
        hop = node.latency_s + size / node.bytes_per_s
        found = dataclasses.replace(found, handed=self.stages * hop)
        stage = self.fullest * layers.total + max(first.total, last.total) + hop
        return dataclasses.replace(found, idle=max(0.0, engines * stage - found.total))

    def _layers_step(self, seats: int) -> StepSeconds:
        sent = layers_sent(self._profile, self.parts, seats, self._itemsize)
        rows = self._profile.rows
        numbers = sum(math.prod(row.shape) * _times(row) for row in rows if not row.of_seat)
        pairs = 2 * seats * self._profile.group * numbers / (self._heads * self._ring)
        seen = [self._row_bytes(row) * _times(row) / self._shared(row) for row in rows]
        return self._step(self._layers, seats, sent, cached=seats * math.fsum(seen), pairs=pairs)

    def _first_step(self, seats: int) -> StepSeconds:
        tables = [info for info in self._first if "vocab" in info.dims]
        sent = [s for one in tables for s in table_sent(self.parts, one, seats, self._itemsize)]
        # A table that is the head too is read as that.
        return self._step([one for one in self._first if one not in self._last], seats, sent)

    def _last_step(self, seats: int) -> StepSeconds:
        heads = [info for info in self._last if "vocab" in info.dims and is_matrix(info)]
        sent = [s for one in heads for s in head_sent(self.parts, one, seats, self._itemsize)]
        return self._step(self._last, seats, sent)

    def _step(
        self,
        infos: Sequence[ParamInfo],
        seats: int,
        sent: Sequence[Sent],
        *,
        cached: float = 0.0,
        pairs: float = 0.0,
    ) -> StepSeconds:
        """Of these parameters alone, with bytes of the cache and FLOPs of attention beside them."""
        rates = self._rates
        read = sum((self._read(info, seats) for info in infos), cached)
        flops = seats * math.fsum(map(self._flops, infos))
        return StepSeconds(
            reading=read / rates.memory,
            compute=flops / rates.matmuls + pairs / rates.pairs,
            waited=math.fsum(collectives_seconds(self._target, self.parts, sent, rates)),
        )

    def _split(self, info: ParamInfo) -> int:
        return self.parts.size(self.parts.axes("params", info.dims, info.shape))

    def _bytes(self, info: ParamInfo) -> float:
        size = info.at_rest(self.plan.precision.params).itemsize
        return size * math.prod(info.shape) / self._split(info)

    def _held(self, infos: Sequence[ParamInfo]) -> float:
        return math.fsum(map(self._bytes, infos))

    def _read(self, info: ParamInfo, seats: int) -> float:
        """Bytes that a step reads: of experts as many as its tokens may choose."""
        chosen = min(1.0, seats * self._profile.share) if "experts" in info.dims else 1.0
        return 0.0 if is_table(info) else chosen * self._bytes(info)

    def _flops(self, info: ParamInfo) -> float:
        """Of a token on a device."""
        share = self._profile.share if "experts" in info.dims else 1.0
        return 2 * share * info.numbers / self._split(info) if is_matrix(info) else 0.0

    def _shared(self, row: CacheRow) -> int:
        """Devices that share the pages of an array."""
        return 1 if row.of_seat else self._ring

    def _row_bytes(self, row: CacheRow) -> float:
        """Of a page, or of a seat, on the device that has it."""
        shape = (row.shape[0], row.shape[1] * self._shared(row), *row.shape[2:])
        split = self.parts.size(self.parts.axes("cache", row.dims, shape))
        return row.itemsize * math.prod(shape) / split

    def _working(self, seats: int) -> float:
        """Of the larger step: its logits, or a layer, whichever is more."""
        config = self._profile.config
        parts = self.parts.size(self.parts.axes("activations", ("vocab",), (config.vocab,)))
        logits = 4 * seats * config.vocab
        tokens = max(self._profile.served.mixed, seats)
        wide = math.fsum(map(self._flops, self._layers)) / 2 / config.embed / config.layers
        layer = WIDTHS * self._itemsize * tokens * wide
        return max((LOGITS + OWN_LOGITS / parts) * logits, SCORED * logits / parts, layer)


def _times(row: CacheRow) -> float:
    """Rows of an array that a token of a full sequence looks at."""
    return 1.0 if row.of_seat else row.read / PAGE_TOKENS
