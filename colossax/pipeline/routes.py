"""A table as arrays: what each stage does at each tick, and where what it reads was put.

Of what waits for its reader there is a ring of slots, written at the tick's number modulo their
count, by all stages alike; only reading goes to another slot for each stage.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from colossax.errors import PlanError
from colossax.pipeline.table import Kind, Table

_LONGEST = 4
"""Phases of a block at most."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Cells:
    """Operations of one kind, each array `[ticks, stages]`; 0 where there is none.

    Attributes:
        active: Whether there is one.
        microbatch: Its.
        chunk: Its.
        source: Tick at whose end its input was sent to this stage.
        forward: Tick of the forward pass of the same microbatch and chunk.
    """

    active: np.ndarray
    microbatch: np.ndarray
    chunk: np.ndarray
    source: np.ndarray
    forward: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """Consecutive ticks in which the same is done.

    Attributes:
        start: First tick.
        stop: After the last one.
        forward: Whether any stage has a forward pass there.
        backward: Likewise backward.
        loss: Whether a microbatch leaves the last position.
        enters: Whether one may come to position 0.
        returns: Whether the gradient of one may leave it.
    """

    start: int
    stop: int
    forward: bool
    backward: bool
    loss: bool
    enters: bool
    returns: bool

    @property
    def needs(self) -> tuple[bool | int, ...]:
        """What makes phases alike."""
        does = self.forward, self.backward, self.loss, self.enters, self.returns
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
        backward: Whole backward passes.
        enters: `[ticks]`, the microbatch that comes to position 0; -1 where none does.
        ends: `[ticks]`, that whose loss is computed; likewise.
        turns: `[ticks]`, the tick in which the loss was computed of that which the last position
            goes back with; -1 where it does not.
        returns: `[ticks]`, that whose gradient leaves position 0; -1 where none does.
        kept: Slots of what forward keeps for backward.
        counted: Slots of what layers count for the loss.
        waiting: Slots of inputs that have been sent.
        returning: Slots of gradients that have been sent.
        turning: Slots of gradients of the loss.
        blocks: The phases of all ticks, in order; what repeats is said once, so that a program
            does not grow with the number of microbatches.
    """

    forward: Cells
    backward: Cells
    enters: np.ndarray
    ends: np.ndarray
    turns: np.ndarray
    returns: np.ndarray
    kept: int
    counted: int
    waiting: int
    returning: int
    turning: int
    blocks: tuple[Block, ...]

    @property
    def forward_ticks(self) -> np.ndarray:
        """`[microbatches, chunks, stages]`, the tick of each forward pass."""
        cells = self.forward
        sizes = cells.microbatch.max() + 1, cells.chunk.max() + 1, cells.active.shape[1]
        ticks = np.zeros(sizes, np.int32)
        at, stage = np.nonzero(cells.active)
        ticks[cells.microbatch[at, stage], cells.chunk[at, stage], stage] = at
        return ticks


def routes_of(table: Table) -> Routes:
    """The arrays of a table whose positions follow one another around the stages.

    Raises:
        PlanError: The next position is not on the next stage, or backward passes are in two parts.
    """
    places = {place: at for at, place in enumerate(table.layout)}
    last = len(table.layout) - 1
    if any(stage != at % table.stages for at, (stage, _) in enumerate(table.layout)):
        raise PlanError(
            "pipeline: in one program for all stages, the chunks of a model follow one another"
            " around the stages, and this table's do not; give schedule 1f1b or interleaved"
        )
    at: dict[Kind, dict[tuple[int, int], int]] = {kind: {} for kind in Kind}
    for tick, stage, op in table.operations():
        at[op.kind][places[stage, op.chunk], op.microbatch] = tick
    if at[Kind.INPUT] or at[Kind.WEIGHT]:
        raise PlanError("pipeline: this table has backward passes in two parts; give 1f1b")
    ahead, back = at[Kind.FORWARD], at[Kind.BACKWARD]
    sent = {(p, m): ahead.get((p - 1, m), t - 1) for (p, m), t in ahead.items()}
    returned = {(p, m): back.get((p + 1, m), t - 1) for (p, m), t in back.items()}
    turned = {t: ahead[p, m] for (p, m), t in back.items() if p == last}
    forward = _cells(table, Kind.FORWARD, places, sent, ahead)
    backward = _cells(table, Kind.BACKWARD, places, returned, ahead)
    ends = _per_tick(table, {t: m for (p, m), t in ahead.items() if p == last})
    enters = _per_tick(table, {t: m for (p, m), t in ahead.items() if not p})
    returns = _per_tick(table, {t: m for (p, m), t in back.items() if not p})
    works = [np.any(cells.active, axis=1) for cells in (forward, backward)]
    # Chunks take turns at position 0, and a phase for each turn is not worth its program.
    outer = [enters >= 0, returns >= 0] if last < table.stages else works
    return Routes(
        forward=forward,
        backward=backward,
        enters=enters,
        ends=ends,
        turns=_per_tick(table, turned),
        returns=returns,
        kept=1 + _longest((t, ahead[key]) for key, t in back.items()),
        counted=1 + _longest((ahead[last, m], t) for (_, m), t in ahead.items()),
        waiting=_longest((t, sent[key]) for key, t in ahead.items()),
        returning=max(1, _longest((t, returned[key]) for key, t in back.items())),
        turning=1 + _longest(turned.items()),
        blocks=tuple(_blocks(list(_phases([*works, ends >= 0, *outer])))),
    )


def _longest(spans: Iterable[tuple[int, int]]) -> int:
    return max((end - start for end, start in spans), default=0)


def _cells(table: Table, kind: Kind, places: dict, sources: dict, ahead: dict) -> Cells:
    shape = (len(table.ticks), table.stages)
    arrays = {f.name: np.zeros(shape, np.int32) for f in dataclasses.fields(Cells)}
    for tick, stage, op in table.operations():
        if op.kind is not kind:
            continue
        key = places[stage, op.chunk], op.microbatch
        found = (1, op.microbatch, op.chunk, sources[key], ahead[key])
        for array, value in zip(arrays.values(), found, strict=True):
            array[tick, stage] = value
    return Cells(**{**arrays, "active": arrays["active"] > 0})


def _per_tick(table: Table, found: dict[int, int]) -> np.ndarray:
    return np.array([found.get(tick, -1) for tick in range(len(table.ticks))], np.int32)


def _phases(said: Sequence[Any]) -> Iterable[Phase]:
    """Of arrays `[ticks]`: whether there is forward, backward, a loss, who enters and returns."""
    rows = list(zip(*(each.tolist() for each in said), strict=True))
    start = 0
    for stop in range(1, len(rows) + 1):
        if stop == len(rows) or rows[stop] != rows[start]:
            names = ("forward", "backward", "loss", "enters", "returns")
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
