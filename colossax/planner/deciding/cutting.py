"""Layers, devices and a schedule: the layers of each chunk, and a better order of the devices."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from colossax.errors import PlanError
from colossax.pipeline import Kind, Table
from colossax.pipeline.cuts import Cuts, Link, StageDevice, cut_layers
from colossax.pipeline.order import Ordered, order_devices
from colossax.planner.counting.layer_costs import StackCosts
from colossax.planner.deciding.stage_speeds import CUTS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cutting:
    """Layers to be cut, and what they are cut for.

    Attributes:
        costs: Of the layers.
        stages: Devices of each stage, as they come.
        table: The schedule.
        links: Between any two of the stages; None: what is sent takes no time.
        order: Numbers of the devices that the stages have, as `pipeline.order`; None: as they come.
    """

    costs: StackCosts
    stages: Sequence[StageDevice]
    table: Table
    links: Sequence[Sequence[Link]] | None = None
    order: Sequence[int] | None = None

    def decided(self, *, search: bool) -> tuple[Cuts, list[int] | None, list[str]]:
        """The cuts; the order of devices, None as they come; and what to tell of that.

        Args:
            search: Whether the order may be another; else a better one is told.

        Raises:
            PlanError: There are fewer layers than chunks, no such cuts fit, or an order is searched
                for several chunks.
        """
        self._check(search)
        better = self._ordered(search)
        if search and better is not None:
            order = self._named(better)
            return better.cuts, order, [f"devices in the order {_shown(order)}"]
        try:
            cuts = self.cut()
        except PlanError as problem:
            hint = "" if better is None else f"; {self._hint(better)} they fit"
            raise PlanError(f"{CUTS}: {problem}{hint}") from problem
        if better is None or better.cuts.slowest_s >= 0.99 * cuts.slowest_s:
            return cuts, None, []
        gain = cuts.slowest_s / better.cuts.slowest_s
        return cuts, None, [f"{self._hint(better)} a modelled {gain:.2f} times as fast"]

    def cut(self) -> Cuts:
        """The layers of each chunk, for devices as they come, such that the slowest is fastest.

        Of several chunks each counts as a stage of its own on its stage's devices. They are cut as
        if memory had no bound, and where a stage's chunks then exceed it, each with its share.

        Raises:
            PlanError: No such cuts fit; of several chunks, none with equal shares.
        """
        chunks, layout = self.table.chunks, self.table.layout
        given: dict[str, Any] = {**self._given, "links": self._between()}
        whole = [self.stages[stage] for stage, _ in layout]
        if chunks > 1:
            free = [dataclasses.replace(device, memory_bytes=None) for device in whole]
            cuts = cut_layers(self.costs.layers, free, **given)
            if _fit(cuts, self.stages, self.table):
                return cuts
            whole = [_share(device, chunks) for device in whole]
        try:
            return cut_layers(self.costs.layers, whole, **given)
        except PlanError as problem:
            if chunks == 1:
                raise
            raise PlanError(
                f"none are found that give each of a stage's {chunks} chunks an equal share of its"
                f" memory: by chunks in the order of the model, each a stage of its own, {problem};"
                f" or the cuts themselves"
            ) from problem

    @property
    def _given(self) -> dict[str, Any]:
        ends = {"first": self.costs.first, "last": self.costs.last}
        return {"in_flight": in_flight(self.table), **ends}

    def _between(self) -> list[Link] | None:
        """From each chunk to the next."""
        if self.links is None:
            return None
        pairs = itertools.pairwise(stage for stage, _ in self.table.layout)
        return [self.links[a][b] if a != b else Link() for a, b in pairs]

    def _ordered(self, search: bool) -> Ordered | None:
        """The best order where it is another one; None as well where none fits."""
        different = {dataclasses.replace(stage, kind="") for stage in self.stages}
        links = {link for row in self.links or () for link in row}
        if self.table.chunks > 1 or (len(different) == 1 and len(links) < 2):
            return None
        try:
            found = order_devices(self.costs.layers, self.stages, links=self.links, **self._given)
        except PlanError as problem:
            if search:
                raise PlanError(f"{CUTS}: {problem}") from problem
            return None
        return None if found.devices == tuple(range(len(self.stages))) else found

    def _named(self, found: Ordered) -> list[int]:
        """Its order, of the devices as they come."""
        return [at if self.order is None else self.order[at] for at in found.devices]

    def _hint(self, found: Ordered) -> str:
        order = self._named(found)
        return f"with devices in the order {_shown(order)} (--plan.pipeline.order auto)"

    def _check(self, search: bool) -> None:
        table, layers = self.table, len(self.costs.layers)
        if len(table.layout) > layers:
            of = f" of {table.chunks} chunks" if table.chunks > 1 else ""
            raise PlanError(
                f"{CUTS}: {table.stages} stages{of} need {len(table.layout)} layers or more, and"
                f" there are {layers}; give fewer stages{' or chunks' if of else ''}"
            )
        if search and table.chunks > 1:
            raise PlanError(
                "plan.pipeline.order auto: it is found for stages of one chunk; give the order, as"
                " 1,0, or leave it out (none)"
            )


def _shown(order: Sequence[int]) -> str:
    return ",".join(map(str, order))


def _share(device: StageDevice, chunks: int) -> StageDevice:
    memory = None if device.memory_bytes is None else device.memory_bytes / chunks
    return dataclasses.replace(device, memory_bytes=memory)


def _fit(cuts: Cuts, stages: Sequence[StageDevice], table: Table) -> bool:
    """Whether the chunks of each stage are within its memory together."""
    needed = [0.0] * len(stages)
    for (stage, _), size in zip(table.layout, cuts.modelled_bytes, strict=True):
        needed[stage] += size
    pairs = zip(needed, stages, strict=True)
    return all(one.memory_bytes is None or size <= one.memory_bytes for size, one in pairs)


_KEPT = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.WEIGHT: -1}


def in_flight(table: Table) -> list[int]:
    """Most microbatches that each chunk keeps at a time, by position."""
    orders = [table.order(stage) for stage in range(table.stages)]
    return [
        max(
            itertools.accumulate(_KEPT.get(op.kind, 0) for op in orders[stage] if op.chunk == chunk)
        )
        for stage, chunk in table.layout
    ]
