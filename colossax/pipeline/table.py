"""A schedule as data: what each stage of a pipeline does in each tick."""

import dataclasses
import functools
import json
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

from colossax.config import nearest
from colossax.documents import as_kind, parse_json
from colossax.errors import PlanError


class Kind(StrEnum):
    """What is done with a microbatch.

    `backward` is `input` and `weight` in one: the gradients of a chunk's input and of its
    parameters.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT = "input"
    WEIGHT = "weight"


FORMS = ("lockstep", "free")
"""One program on all devices, or one for each stage."""

KINDS = tuple(Kind)
"""In the order in which the operations of a cell run."""


@dataclasses.dataclass(frozen=True)
class Op:
    """What a stage does with one microbatch, by one of its chunks; the kind may be its word.

    Raises:
        PlanError: An unknown kind.
    """

    kind: Kind
    microbatch: int
    chunk: int = 0

    def __post_init__(self):
        if type(self.kind) is not Kind:
            if self.kind not in KINDS:
                raise PlanError(
                    f"schedule: unknown kind of operation '{self.kind}'{nearest(self.kind, KINDS)}"
                )
            object.__setattr__(self, "kind", Kind(self.kind))

    def __str__(self) -> str:
        return f"{self.kind} of microbatch {self.microbatch}, chunk {self.chunk}"


Cell = tuple[Op, ...]


@dataclasses.dataclass(frozen=True)
class Table:
    """A schedule.

    What an operation reads from another stage was written in an earlier tick. The operations of a
    cell run in the order forward, backward or input gradient, weight gradient, however they are
    listed, so that the last stage may go back with what it has just brought forward. Nothing of
    this is looked at here: `checked` does.

    Attributes:
        stages: How many.
        microbatches: How many go through all of them.
        chunks: Of each stage.
        layout: Of each position, the order of chunks in the model: the stage and its chunk.
        ticks: `ticks[t][s]` is what stage `s` does in tick `t`.
    """

    stages: int
    microbatches: int
    chunks: int
    layout: tuple[tuple[int, int], ...]
    ticks: tuple[tuple[Cell, ...], ...]

    def position(self, stage: int, chunk: int = 0) -> int:
        """Where a chunk of a stage stands in the model.

        Raises:
            KeyError: The layout does not have it.
        """
        return self._positions[stage, chunk]

    def where(self, kind: Kind, position: int, microbatch: int) -> tuple[int, int]:
        """Tick and stage of an operation; cost O(1) after the first call, which reads the table.

        Raises:
            KeyError: The table does not have it.
        """
        return self._places[kind, position, microbatch]

    def has(self, kind: Kind, position: int, microbatch: int) -> bool:
        """Whether there is such an operation."""
        return (kind, position, microbatch) in self._places

    def operations(self) -> Iterator[tuple[int, int, Op]]:
        """(tick, stage, operation), in the order in which they run."""
        for tick, cells in enumerate(self.ticks):
            for stage, cell in enumerate(cells):
                for op in in_order(cell):
                    yield tick, stage, op

    def order(self, stage: int) -> tuple[Op, ...]:
        """All that a stage does, one after the other."""
        return tuple(op for cells in self.ticks for op in in_order(cells[stage]))

    def kinds(self, tick: int) -> tuple[Kind, ...]:
        """What any stage does in a tick, in the order of `KINDS`."""
        found = {op.kind for cell in self.ticks[tick] for op in cell}
        return tuple(kind for kind in KINDS if kind in found)

    @functools.cached_property
    def _positions(self) -> dict[tuple[int, int], int]:
        return {chunk: position for position, chunk in enumerate(self.layout)}

    @functools.cached_property
    def _places(self) -> dict[tuple[Kind, int, int], tuple[int, int]]:
        return {
            (op.kind, self._positions[stage, op.chunk], op.microbatch): (tick, stage)
            for tick, stage, op in self.operations()
        }

    def to_json(self) -> str:
        """All of it; `Table.from_json` gives an equal table."""
        ticks = [[[_to_list(op) for op in cell] for cell in cells] for cells in self.ticks]
        fields = {name: getattr(self, name) for name in _FIELDS}
        return json.dumps({**fields, "ticks": ticks})

    @classmethod
    def from_json(cls, text: str | bytes) -> "Table":
        """A table as `to_json` writes it.

        An operation is `["forward", microbatch, chunk]`; the chunk, `chunks` and `layout` may be
        left out, then chunk 0, one chunk, and positions that go round the stages. What the table
        says is for `checked` to judge.

        Raises:
            PlanError: Not JSON, or a value that is something else than it should be.
        """
        try:
            return _from_object(parse_json(text))
        except ValueError as problem:
            raise PlanError(f"schedule: {problem}; write it as Table.to_json does") from problem


def in_order(cell: Cell) -> Cell:
    """The operations of a cell as they run."""
    return tuple(sorted(cell, key=_rank)) if len(cell) > 1 else cell


def round_layout(stages: int, chunks: int) -> tuple[tuple[int, int], ...]:
    """Positions that go round the stages: chunk 0 of each, then chunk 1 of each."""
    return tuple((stage, chunk) for chunk in range(chunks) for stage in range(stages))


def v_layout(stages: int) -> tuple[tuple[int, int], ...]:
    """Positions that go down the stages and up again: the first stage has both ends."""
    down = [(stage, 0) for stage in range(stages)]
    return (*down, *((stage, 1) for stage in reversed(range(stages))))


def _rank(op: Op) -> int:
    return _RANKS[op.kind]


_RANKS = {kind: rank for rank, kind in enumerate(KINDS)}

_FIELDS = ("stages", "microbatches", "chunks", "layout", "ticks")

_LARGEST = 1 << 20
"""Of sizes that are read: what a layout of them takes is small."""


def _to_list(op: Op) -> list[Any]:
    return [str(op.kind), op.microbatch, op.chunk]


def _from_object(value: dict[str, Any]) -> Table:
    for name in value:
        if name not in _FIELDS:
            raise ValueError(f"unknown field '{name}'{nearest(name, _FIELDS)}")
    stages, microbatches = _size(value, "stages"), _size(value, "microbatches")
    chunks = _size(value, "chunks", 1)
    if stages * chunks > _LARGEST:
        raise ValueError(f"it has {stages} stages of {chunks} chunks, more than {_LARGEST} in all")
    layout = _layout(value["layout"]) if "layout" in value else round_layout(stages, chunks)
    return Table(stages, microbatches, chunks, layout, _ticks(value.get("ticks")))


def _size(value: dict[str, Any], name: str, default: int | None = None) -> int:
    if name not in value and default is None:
        raise ValueError(f"it has no '{name}'")
    size = as_kind(value.get(name, default), int, f"'{name}'")
    if not 1 <= size <= _LARGEST:
        raise ValueError(f"'{name}' is {size}, not 1 or more and at most {_LARGEST}")
    return size


def _layout(value: Any) -> tuple[tuple[int, int], ...]:
    return tuple(
        _pair(as_kind(one, list, f"position {position} of 'layout'"), position)
        for position, one in enumerate(as_kind(value, list, "'layout'"))
    )


def _pair(value: list[Any], position: int) -> tuple[int, int]:
    what = f"position {position} of 'layout'"
    if len(value) != 2:
        raise ValueError(f"{what} has {len(value)} numbers, not a stage and a chunk")
    return as_kind(value[0], int, what), as_kind(value[1], int, what)


def _ticks(value: Any) -> tuple[tuple[Cell, ...], ...]:
    return tuple(
        tuple(
            _cell(cell, f"the cell of tick {tick}, stage {stage}")
            for stage, cell in enumerate(as_kind(cells, list, f"tick {tick}"))
        )
        for tick, cells in enumerate(as_kind(value, list, "'ticks'"))
    )


def _cell(value: Any, where: str) -> Cell:
    return tuple(
        _op(as_kind(one, list, f"an operation in {where}"), where)
        for one in as_kind(value, list, where)
    )


def _op(value: list[Any], where: str) -> Op:
    what = f"an operation in {where}"
    if len(value) not in (2, 3):
        raise ValueError(f"{what} is a list of {len(value)}, not [kind, microbatch, chunk]")
    name = as_kind(value[0], str, f"the kind of {what}")
    if name not in KINDS:
        raise ValueError(f"{what} is of an unknown kind '{name}'{nearest(name, KINDS)}")
    numbers = (as_kind(number, int, f"a number of {what}") for number in value[1:])
    return Op(Kind(name), *numbers)
