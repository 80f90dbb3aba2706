"""A table as arrays: what each stage does at each tick, and where what it reads was put.

Of what waits for its reader there is a ring of slots, written at the tick's number modulo their
count, by all stages alike; only reading goes to another slot for each stage.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from colossax.errors import PlanError
from colossax.pipeline.check import movable
from colossax.pipeline.table import Cell, Kind, Table

_LONGEST = 4
"""Phases of a block at most."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Cells:
    """Operations of one kind, each array `[ticks, stages]`; 0 where there is none.

    Attributes:
        active: Whether there is one.
        microbatch: Its.
        chunk: Its, chunks being numbered by where they stand in the model.
        source: Tick at whose end its input was sent to this stage; of a weight gradient, that of
            the input gradient.
        way: By which of `Routes.ways` it was sent.
        forward: Tick of the forward pass of the same microbatch and chunk.
    """

    active: np.ndarray
    microbatch: np.ndarray
    chunk: np.ndarray
    source: np.ndarray
    way: np.ndarray
    forward: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """Consecutive ticks in which the same is done.

    Attributes:
        start: First tick.
        stop: After the last one.
        forward: Whether any stage has a forward pass there.
        backward: Likewise backward, or an input gradient.
        weight: Likewise a weight gradient of its own.
        loss: Whether a microbatch leaves the last position.
        enters: Whether one may come to position 0.
        returns: Whether the gradient of one may leave it.
    """

    start: int
    stop: int
    forward: bool
    backward: bool
    weight: bool
    loss: bool
    enters: bool
    returns: bool

    @property
    def needs(self) -> tuple[bool | int, ...]:
        """What makes phases alike."""
        does = self.forward, self.backward, self.weight, self.loss, self.enters, self.returns
        return *does, self.stop - self.start


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """Phases that are gone through several times, one after another.

    Attributes:
        repeats: How often; `phases` are those of the first time.
        phases: In order.
    """

    repeats: int
    phases: tuple[Phase, ...]

    @property
    def ticks(self) -> int:
        """Of one time."""
        return self.phases[-1].stop - self.phases[0].start


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Routes:
    """What an executor in lock step needs of a table.

    Attributes:
        forward: Forward passes.
        backward: Whole backward passes; where there are weight gradients, input gradients.
        weight: Weight gradients.
        enters: `[ticks]`, the microbatch that comes to position 0; -1 where none does.
        ends: `[ticks]`, that whose loss is computed; likewise.
        turns: `[ticks]`, the tick in which the loss was computed of that which the last position
            goes back with; -1 where it does not.
        returns: `[ticks]`, that whose gradient leaves position 0; -1 where none does.
        order: `[chunks, stages]`: of the parts that a chunk is cut into, in the order of the
            model, the one that each stage has.
        ways: By how many stages outputs go on, 1, -1 or 0; gradients go back by as many.
        kept: Slots of what forward keeps for backward, or for an input gradient.
        held: The same for weight gradients.
        pending: Slots of what input gradients leave for weight gradients; 0 where none are apart.
        counted: Slots of what layers count for the loss.
        waiting: Slots of inputs that have been sent, for each way.
        returning: Slots of gradients that have been sent, likewise.
        turning: Slots of gradients of the loss.
        blocks: The phases of all ticks, in order; what repeats is said once, so that a program
            does not grow with the number of microbatches.
    """

    forward: Cells
    backward: Cells
    weight: Cells
    enters: np.ndarray
    ends: np.ndarray
    turns: np.ndarray
    returns: np.ndarray
    order: np.ndarray
    ways: tuple[int, ...]
    kept: int
    held: int
    pending: int
    counted: int
    waiting: tuple[int, ...]
    returning: tuple[int, ...]
    turning: int
    blocks: tuple[Block, ...]

    @property
    def first(self) -> int:
        """Stage of position 0."""
        return int(np.flatnonzero(self.order[0] == 0)[0])

    @property
    def last(self) -> int:
        """Stage of the last position."""
        return int(np.argmax(self.order[-1]))

    @property
    def forward_ticks(self) -> np.ndarray:
        """`[microbatches, chunks, stages]`, the tick of each forward pass."""
        cells = self.forward
        sizes = cells.microbatch.max() + 1, *self.order.shape
        ticks = np.zeros(sizes, np.int32)
        at, stage = np.nonzero(cells.active)
        ticks[cells.microbatch[at, stage], cells.chunk[at, stage], stage] = at
        return ticks


def routes_of(table: Table) -> Routes:
    """The arrays of a table.

    Raises:
        PlanError: A result goes to a stage that is no neighbour; of as many positions in a row as
            there are stages, two are on one; whole backward passes and parts of others in a cell.
    """
    order, step = _order(table), _steps(movable(table))
    ways = tuple(way for way in (1, -1, 0) if way in step) or (1,)
    last = len(table.layout) - 1
    at = _ticks(in_parts(table))
    ahead, late = at[Kind.FORWARD], at[Kind.WEIGHT]
    back = at[Kind.INPUT] if late else at[Kind.BACKWARD]
    sent = {(p, m): ahead.get((p - 1, m), t - 1) for (p, m), t in ahead.items()}
    returned = {(p, m): back.get((p + 1, m), t - 1) for (p, m), t in back.items()}
    turned = {t: ahead[p, m] for (p, m), t in back.items() if p == last}
    came = [ways.index(way) for way in (ways[0], *step)]
    went = [*came[1:], 0]
    cells = functools.partial(_cells, table, forward=ahead)
    forward, backward = cells(ahead, sent, came), cells(back, returned, went)
    weight = cells(late, back, went)
    ends = _per_tick(table, {t: m for (p, m), t in ahead.items() if p == last})
    enters = _per_tick(table, {t: m for (p, m), t in ahead.items() if not p})
    returns = _per_tick(table, {t: m for (p, m), t in back.items() if not p})
    works = [np.any(each.active, axis=1) for each in (forward, backward, weight)]
    # Chunks take turns at position 0, and a phase for each turn is not worth its program.
    outer = [enters >= 0, returns >= 0] if last < table.stages else works[:2]
    return Routes(
        forward=forward,
        backward=backward,
        weight=weight,
        enters=enters,
        ends=ends,
        turns=_per_tick(table, turned),
        returns=returns,
        order=order,
        ways=ways,
        kept=1 + _longest((t, ahead[key]) for key, t in back.items()),
        held=1 + _longest((t, ahead[key]) for key, t in (late or back).items()),
        pending=1 + _longest((t, back[key]) for key, t in late.items()) if late else 0,
        counted=1 + _longest((ahead[last, m], t) for (_, m), t in ahead.items()),
        waiting=_waiting(ahead, sent, came, len(ways)),
        returning=_waiting(back, returned, went, len(ways)),
        turning=1 + _longest(turned.items()),
        blocks=tuple(_blocks(list(_phases([*works, ends >= 0, *outer])))),
    )


Ticks = dict[tuple[int, int], int]
"""Of (position, microbatch)."""


def _order(table: Table) -> np.ndarray:
    """See `Routes.order`."""
    order = np.full((table.chunks, table.stages), -1, np.int32)
    for position, (stage, _) in enumerate(table.layout):
        chunk, part = divmod(position, table.stages)
        if order[chunk, stage] >= 0:
            first = chunk * table.stages
            raise PlanError(
                f"schedule: positions {first + order[chunk, stage]} and {position} are both on"
                f" stage {stage}, and in one program each {table.stages} positions in a row, from"
                f" {first} on, are on as many stages; lay them out so"
            )
        order[chunk, stage] = part
    return order


def _steps(table: Table) -> list[int]:
    """By how many stages the output of each position but the last goes on: 1, -1 or 0."""
    pairs = itertools.pairwise(stage for stage, _ in table.layout)
    steps = [(to - at) % table.stages for at, to in pairs]
    return [step if step < 2 else -1 for step in steps]


def in_parts(table: Table) -> Table:
    """Where any backward pass is in two parts, all of them: both parts in one tick."""
    if not any(op.kind is Kind.WEIGHT for _, _, op in table.operations()):
        return table
    ticks = [
        tuple(_parted(cell, tick, stage) for stage, cell in enumerate(cells))
        for tick, cells in enumerate(table.ticks)
    ]
    return dataclasses.replace(table, ticks=tuple(ticks))


def _parted(cell: Cell, tick: int, stage: int) -> Cell:
    kinds = [op.kind for op in cell]
    if Kind.BACKWARD not in kinds:
        return cell
    if Kind.INPUT in kinds or Kind.WEIGHT in kinds:
        raise PlanError(
            f"schedule: tick {tick}, stage {stage}: a whole backward pass beside a part of another,"
            " which one program for all stages does not run; move one to another tick"
        )
    parts = (Kind.INPUT, Kind.WEIGHT)
    return tuple(
        dataclasses.replace(op, kind=kind)
        for op in cell
        for kind in (parts if op.kind is Kind.BACKWARD else (op.kind,))
    )


def _ticks(table: Table) -> dict[Kind, Ticks]:
    at: dict[Kind, Ticks] = {kind: {} for kind in Kind}
    for tick, stage, op in table.operations():
        at[op.kind][table.position(stage, op.chunk), op.microbatch] = tick
    return at


def _waiting(at: Ticks, sources: Ticks, ways: Sequence[int], count: int) -> tuple[int, ...]:
    """Slots for each way of what is sent in one tick and read in another."""
    spans = [[(t, sources[p, m]) for (p, m), t in at.items() if ways[p] == n] for n in range(count)]
    return tuple(max(1, _longest(each)) for each in spans)


def _longest(spans: Iterable[tuple[int, int]]) -> int:
    return max((end - start for end, start in spans), default=0)


def _cells(table: Table, at: Ticks, sources: Ticks, ways: Sequence[int], forward: Ticks) -> Cells:
    shape = (len(table.ticks), table.stages)
    arrays = {f.name: np.zeros(shape, np.int32) for f in dataclasses.fields(Cells)}
    for (position, microbatch), tick in at.items():
        key, chunk = (position, microbatch), position // table.stages
        found = (1, microbatch, chunk, sources[key], ways[position], forward[key])
        for array, value in zip(arrays.values(), found, strict=True):
            array[tick, table.layout[position][0]] = value
    return Cells(**{**arrays, "active": arrays["active"] > 0})


def _per_tick(table: Table, found: dict[int, int]) -> np.ndarray:
    return np.array([found.get(tick, -1) for tick in range(len(table.ticks))], np.int32)


def _phases(said: Sequence[np.ndarray]) -> Iterable[Phase]:
    """Of arrays `[ticks]`: what of `Phase` is so."""
    rows = list(zip(*(each.tolist() for each in said), strict=True))
    start = 0
    for stop in range(1, len(rows) + 1):
        if stop == len(rows) or rows[stop] != rows[start]:
            names = ("forward", "backward", "weight", "loss", "enters", "returns")
            yield Phase(start=start, stop=stop, **dict(zip(names, rows[start], strict=True)))
            start = stop


def _blocks(phases: Sequence[Phase]) -> Iterable[Block]:
    """What repeats as blocks, the most phases that can be saved first at each place."""
    at = 0
    while at < len(phases):
        length, repeats = max(
            ((n, _repeats(phases, at, n)) for n in range(1, _LONGEST + 1)),
            key=lambda found: (found[0] * (found[1] - 1), -found[0]),
        )
        yield Block(repeats=repeats, phases=tuple(phases[at : at + length]))
        at += length * repeats


def _repeats(phases: Sequence[Phase], at: int, length: int) -> int:
    """How often these phases come one after another."""
    needs = [phase.needs for phase in phases]
    wanted, count = needs[at : at + length], 1
    while needs[at + count * length :][:length] == wanted:
        count += 1
    return count


def forward_alone(table: Table) -> Table:
    """The forward passes of a table, and no ticks after the last of them."""
    ticks = [
        tuple(tuple(op for op in cell if op.kind is Kind.FORWARD) for cell in cells)
        for cells in table.ticks
    ]
    while not any(ticks[-1]):
        ticks.pop()
    return dataclasses.replace(table, ticks=tuple(ticks))
