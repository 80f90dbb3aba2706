"""When the operations of a table run."""

import dataclasses
import itertools
from typing import NamedTuple

from colossax.config import Natural, NotNegative, at_least, check_types
from colossax.errors import PlanError
from colossax.pipeline.table import KINDS, Kind, Op, Table
from colossax.pipeline.values import Value, read, written

PerStage = float | int | tuple[float | int, ...]
"""One number for all stages, or one for each."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """What a microbatch costs.

    Attributes:
        forward: Seconds of a stage, all of its chunks together; they take equal shares.
        input: The same of the gradient of its input, recomputation included.
        weight: The same of the gradient of its parameters; a backward takes both.
        boundary_bytes: What goes from a position to the next, and its gradient back.
        transfer: Seconds of that on its way to another stage.
    """

    forward: PerStage = 1.0
    input: PerStage = 1.0
    weight: PerStage = 1.0
    boundary_bytes: Natural = 0
    transfer: NotNegative = 0.0

    def __post_init__(self):
        check_types(self, "costs", error=PlanError)
        for kind in _GIVEN:
            for one in _listed(getattr(self, kind)):
                if isinstance(one, bool) or not isinstance(one, float | int):
                    raise PlanError(f"costs.{kind}: found {one!r}; give a number of seconds")
                _SECONDS.check(one, f"costs.{kind}", error=PlanError)

    def seconds(self, kind: Kind, stages: int) -> list[float]:
        """Of each stage, all chunks together.

        Raises:
            PlanError: Numbers for another count of stages.
        """
        if kind is Kind.BACKWARD:
            parts = (self.seconds(part, stages) for part in (Kind.INPUT, Kind.WEIGHT))
            return [sum(both) for both in zip(*parts, strict=True)]
        given = getattr(self, kind)
        found = given if isinstance(given, tuple) else (given,) * stages
        if len(found) != stages:
            raise PlanError(
                f"costs.{kind}: {len(found)} numbers for {stages} stages; give one for each, or one"
                " for all"
            )
        return [float(one) for one in found]

    def of_chunks(self, table: Table) -> dict[Kind, list[float]]:
        """Seconds of an operation of each kind, of a chunk of each stage.

        Raises:
            PlanError: Numbers for another count of stages.
        """
        stages, chunks = table.stages, table.chunks
        return {kind: [one / chunks for one in self.seconds(kind, stages)] for kind in KINDS}


_SECONDS = at_least(0)

_GIVEN = (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)


def _listed(given: PerStage) -> tuple[float | int, ...]:
    return given if isinstance(given, tuple) else (given,)


class Slot(NamedTuple):
    """In lock step: when all devices run a kind of operation; seconds."""

    tick: int
    kind: Kind
    start: float
    end: float


class Span(NamedTuple):
    """When a stage runs an operation; seconds."""

    stage: int
    op: Op
    start: float
    end: float


def slots(table: Table, costs: Costs) -> list[Slot]:
    """What one program on all devices runs, one after another.

    A slot takes as long as on the slowest stage, and its results are sent before the next.
    """
    each, sent, end = costs.of_chunks(table), moves(table), 0.0
    found = []
    for tick in range(len(table.ticks)):
        for kind in table.kinds(tick):
            start, end = end, end + max(each[kind]) + costs.transfer * bool(sent.get(kind))
            found.append(Slot(tick, kind, start, end))
    return found


def lockstep_spans(table: Table, costs: Costs) -> list[Span]:
    """The operations of the table in their slots."""
    each = costs.of_chunks(table)
    starts = {(slot.tick, slot.kind): slot.start for slot in slots(table, costs)}
    found = []
    for tick, stage, op in table.operations():
        start = starts[tick, op.kind]
        found.append(Span(stage, op, start, start + each[op.kind][stage]))
    return found


def free_spans(table: Table, costs: Costs) -> list[Span]:
    """Each stage does what comes next in its cells as soon as its inputs are there.

    The ticks only say an order in which nothing reads what is not written.
    """
    each, free = costs.of_chunks(table), [0.0] * table.stages
    makers: dict[Value, Span] = {}
    found = []
    for _, stage, op in table.operations():
        position = table.position(stage, op.chunk)
        sources = (makers[value] for value in read(op, position, len(table.layout)))
        there = (one.end + costs.transfer * (one.stage != stage) for one in sources)
        start = max(free[stage], *there, 0.0)
        free[stage] = start + each[op.kind][stage]
        found.append(Span(stage, op, start, free[stage]))
        if (value := written(op, position)) is not None:
            makers[value] = found[-1]
    return found


def moves(table: Table) -> dict[Kind, set[int]]:
    """By how many stages, modulo all of them, results of each kind go; without those that stay."""
    pairs = itertools.pairwise(table.layout)
    on = {(to - at) % table.stages for (at, _), (to, _) in pairs} - {0}
    back = {-step % table.stages for step in on}
    return {Kind.FORWARD: on, Kind.BACKWARD: back, Kind.INPUT: back}
