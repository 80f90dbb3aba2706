"""What a schedule takes: seconds, bubble, kept inputs, bytes from stage to stage."""

import collections
import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from colossax.config import nearest
from colossax.errors import PlanError
from colossax.pipeline.table import FORMS, KINDS, Kind, Op, Table
from colossax.pipeline.timeline import Costs, free_spans, lockstep_spans, moves, slots


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What a table takes; lists have a number for each stage.

    Attributes:
        time: Seconds from the first operation to the last.
        useful: Seconds of the operations of the table.
        bubble: Of all stages' time, the share that is not useful.
        executed: Operations of each kind that a device runs, those on zeros included.
        saved: Most inputs of chunks that are kept at a time for backward or an input gradient.
        slots: Room for them on every stage. In lock step all write in each tick, so that it is the
            most ticks from a forward pass to its backward pass or input gradient, and one.
        pending: Most input gradients whose weight gradient is still to come.
        kept: Most forwards whose backward or weight gradient is still to come: what memory holds.
        link_bytes: What is sent from a stage to another, by the two.
    """

    time: float
    useful: tuple[float, ...]
    bubble: float
    executed: Mapping[Kind, int]
    saved: tuple[int, ...]
    slots: int
    pending: tuple[int, ...]
    kept: tuple[int, ...]
    link_bytes: Mapping[tuple[int, int], int]


def simulate(table: Table, costs: Costs | None = None, form: str = "lockstep") -> Report:
    """What a table takes in one of two forms.

    `lockstep`: one program on all devices. A kind of operation that any stage needs in a tick is
    run by all, and takes as long as on the slowest; a result that goes to another stage goes round
    all of them, in each tick with its kind.
    `free`: a program for each stage, which does what comes next in its cells as soon as its inputs
    are there, whatever the tick; only what is read is sent.

    Args:
        table: As `checked` passes it.
        costs: None: a second for each of forward, input and weight gradient.
        form: One of `FORMS`.

    Raises:
        PlanError: An unknown form, or costs that do not fit the table.

    Cost: O(operations + cells).
    """
    if form not in FORMS:
        raise PlanError(f"simulate: unknown form '{form}'{nearest(form, FORMS)}")
    costs, lockstep = costs or Costs(), form == "lockstep"
    spans = (lockstep_spans if lockstep else free_spans)(table, costs)
    time = slots(table, costs)[-1].end if lockstep else max(span.end for span in spans)
    useful = [0.0] * table.stages
    for span in spans:
        useful[span.stage] += span.end - span.start
    orders = [table.order(stage) for stage in range(table.stages)]
    saved = _most(orders, _SAVED)
    return Report(
        time=time,
        useful=tuple(useful),
        bubble=max(0.0, 1 - sum(useful) / (table.stages * time)) if time else 0.0,
        executed=_executed(table, orders, lockstep),
        saved=saved,
        slots=1 + _longest_wait(table) if lockstep else max(saved),
        pending=_most(orders, _PENDING),
        kept=_most(orders, _KEPT),
        link_bytes=(_rolled if lockstep else _sent)(table, costs.boundary_bytes),
    )


_SAVED = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.INPUT: -1}
_PENDING = {Kind.INPUT: 1, Kind.WEIGHT: -1}
_KEPT = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.WEIGHT: -1}


_Orders = Sequence[Sequence[Op]]


def _most(orders: _Orders, step: Mapping[Kind, int]) -> tuple[int, ...]:
    """The highest that a count gets on each stage, which kinds of operations raise and lower."""
    counts = (itertools.accumulate(step.get(op.kind, 0) for op in order) for order in orders)
    return tuple(max(count, default=0) for count in counts)


def _longest_wait(table: Table) -> int:
    """Ticks from a forward pass to the backward pass or input gradient of the same chunk."""
    began: dict[tuple[int, int, int], int] = {}
    longest = 0
    for tick, stage, op in table.operations():
        key = (stage, op.chunk, op.microbatch)
        if op.kind is Kind.FORWARD:
            began[key] = tick
        elif op.kind is not Kind.WEIGHT:
            longest = max(longest, tick - began[key])
    return longest


def _executed(table: Table, orders: _Orders, lockstep: bool) -> dict[Kind, int]:
    if lockstep:
        return _ticks_of(table)
    return {kind: max(sum(op.kind is kind for op in order) for order in orders) for kind in KINDS}


def _ticks_of(table: Table) -> dict[Kind, int]:
    """In how many ticks any stage needs a kind."""
    found = collections.Counter(k for t in range(len(table.ticks)) for k in table.kinds(t))
    return {kind: found[kind] for kind in KINDS}


def _rolled(table: Table, boundary_bytes: int) -> dict[tuple[int, int], int]:
    """Sent where all stages send at once."""
    links: collections.Counter[tuple[int, int]] = collections.Counter()
    ticks = _ticks_of(table)
    for kind, steps in moves(table).items():
        for stage, step in itertools.product(range(table.stages), steps if ticks[kind] else ()):
            links[stage, (stage + step) % table.stages] += ticks[kind] * boundary_bytes
    return dict(links)


def _sent(table: Table, boundary_bytes: int) -> dict[tuple[int, int], int]:
    """Sent where a stage sends what another reads."""
    links: collections.Counter[tuple[int, int]] = collections.Counter()
    for (at, _), (to, _) in itertools.pairwise(table.layout):
        for link in ((at, to), (to, at)) if at != to else ():
            links[link] += table.microbatches * boundary_bytes
    return dict(links)
