"""Whether a table can run."""

import itertools
from collections.abc import Mapping
from typing import NamedTuple

from colossax.errors import PlanError
from colossax.pipeline.table import Cell, Kind, Op, Table, in_order
from colossax.pipeline.values import Value, read, written


def checked(table: Table, *, most_saved: int | None = None) -> Table:
    """The same table, if it can run in either form.

    Args:
        table: Anybody's.
        most_saved: Most inputs of chunks that a stage may keep for backward at a time.

    Raises:
        PlanError: The layout does not name each chunk of each stage once; a tick has not a cell for
            each stage; an operation is missing or there twice, of a microbatch or chunk that is
            not there, or beside another of its kind in its cell; it reads what nobody has written
            yet; a stage keeps more than `most_saved`. Names tick and stage, where there are such.

    Cost: O(operations + cells).
    """
    _check_sizes(table)
    _check_layout(table)
    _check_cells(table)
    _check_reads(table, _check_once(table))
    _check_all_there(table)
    if most_saved is not None:
        _check_saved(table, most_saved)
    return table


def movable(table: Table) -> Table:
    """The same table, if each result goes to a neighbouring stage or stays: what rolls can do.

    The last stage and the first are neighbours.

    Raises:
        PlanError: One goes farther; names positions and stages.
    """
    for position, ((at, _), (to, _)) in enumerate(itertools.pairwise(table.layout)):
        if (to - at) % table.stages not in (0, 1, table.stages - 1):
            raise PlanError(
                f"schedule: position {position} is on stage {at} and position {position + 1} on"
                f" stage {to}, and one program on all devices sends to the next stage or the one"
                " before; lay the positions out on neighbours"
            )
    return table


def _check_sizes(table: Table) -> None:
    for name in ("stages", "microbatches", "chunks"):
        if (size := getattr(table, name)) < 1:
            raise PlanError(f"schedule: it has {size} {name}; give 1 or more")


def _check_layout(table: Table) -> None:
    wanted = set(itertools.product(range(table.stages), range(table.chunks)))
    for position, (stage, chunk) in enumerate(table.layout):
        if (stage, chunk) not in wanted:
            raise PlanError(
                f"schedule: position {position} of the layout is chunk {chunk} of stage {stage},"
                f" which is there twice or is none of {table.stages} stages of {table.chunks}"
                " chunks; name each chunk of each stage once"
            )
        wanted.remove((stage, chunk))
    if wanted:
        stage, chunk = min(wanted)
        raise PlanError(
            f"schedule: the layout lacks chunk {chunk} of stage {stage}; name each chunk of each"
            " stage once"
        )


def _check_cells(table: Table) -> None:
    for tick, cells in enumerate(table.ticks):
        if len(cells) != table.stages:
            raise PlanError(
                f"schedule: tick {tick} has {len(cells)} cells for {table.stages} stages; give one"
                " for each, empty where a stage does nothing"
            )
        for stage, cell in enumerate(cells):
            _check_cell(table, tick, stage, cell)


def _check_cell(table: Table, tick: int, stage: int, cell: Cell) -> None:
    for op in cell:
        counts = {"microbatch": table.microbatches, "chunk": table.chunks}
        for name, count in counts.items():
            if not 0 <= getattr(op, name) < count:
                raise _refusal(
                    tick, stage, f"{op}: the table is of {count}, counted from 0; give one of them"
                )
    for one, other in itertools.pairwise(in_order(cell)):
        if one.kind is other.kind:
            raise _refusal(
                tick, stage, f"{one} beside {other}, two of one kind; move one to another tick"
            )


class _Written(NamedTuple):
    """Where a value comes from."""

    tick: int
    stage: int
    op: Op


_Writers = Mapping[Value, _Written]


def _check_once(table: Table) -> _Writers:
    """Refuse what is there twice; gives who writes each value."""
    writers: dict[Value, _Written] = {}
    weights: dict[Value, _Written] = {}
    for tick, stage, op in table.operations():
        position = table.position(stage, op.chunk)
        found = weights if op.kind is Kind.WEIGHT else writers
        value = written(op, position) or Value(True, position, op.microbatch)
        if value in found:
            before = found[value]
            raise _refusal(
                tick,
                stage,
                f"{op}, which tick {before.tick} has as {before.op.kind}; leave one out",
            )
        found[value] = _Written(tick, stage, op)
    for value, (tick, stage, op) in weights.items():
        if value in writers and writers[value].op.kind is Kind.BACKWARD:
            raise _refusal(tick, stage, f"{op}, which its backward has made; leave one out")
    return writers


def _check_reads(table: Table, writers: _Writers) -> None:
    """Refuse what reads a value before it is written."""
    for tick, stage, op in table.operations():
        for value in read(op, table.position(stage, op.chunk), len(table.layout)):
            source = writers.get(value)
            if source is None or not _before(source, _Written(tick, stage, op)):
                raise _refusal(tick, stage, _unwritten(table, op, value, source))


def _before(source: _Written, reader: _Written) -> bool:
    if source.tick != reader.tick:
        return source.tick < reader.tick
    # From stage to stage goes what one turn makes for the same turn: never within a tick.
    return _TURNS[source.op.kind] < _TURNS[reader.op.kind]


_TURNS = {Kind.FORWARD: 0, Kind.BACKWARD: 1, Kind.INPUT: 1, Kind.WEIGHT: 2}


def _unwritten(table: Table, op: Op, value: Value, source: _Written | None) -> str:
    stage, chunk = table.layout[value.position]
    what = "the gradient that" if value.gradient else "what"
    of = f"{what} stage {stage}, chunk {chunk} makes of microbatch {value.microbatch}"
    if source is None:
        return f"{op} reads {of}, which nobody writes; add that operation to an earlier tick"
    return f"{op} reads {of} in tick {source.tick}; move it to a later tick"


def _check_all_there(table: Table) -> None:
    """Refuse a table that lacks an operation that no other reads."""
    for microbatch, (position, (stage, chunk)) in itertools.product(
        range(table.microbatches), enumerate(table.layout)
    ):
        missing = _missing(table, position, microbatch)
        if missing is not None:
            raise PlanError(
                f"schedule: stage {stage} has no {Op(missing, microbatch, chunk)} in any of"
                f" {len(table.ticks)} ticks; add it"
            )


def _missing(table: Table, position: int, microbatch: int) -> Kind | None:
    """A kind of operation that is not there."""
    if not table.has(Kind.FORWARD, position, microbatch):
        return Kind.FORWARD
    if table.has(Kind.BACKWARD, position, microbatch):
        return None
    if not table.has(Kind.INPUT, position, microbatch):
        return Kind.BACKWARD
    return None if table.has(Kind.WEIGHT, position, microbatch) else Kind.WEIGHT


def _check_saved(table: Table, most: int) -> None:
    saved = [0] * table.stages
    for tick, stage, op in table.operations():
        saved[stage] += {Kind.FORWARD: 1, Kind.WEIGHT: 0}.get(op.kind, -1)
        if saved[stage] > most:
            raise _refusal(
                tick,
                stage,
                f"{op} makes {saved[stage]} inputs that wait for backward, and at most"
                f" {most} may; go back with a microbatch before it",
            )


def _refusal(tick: int, stage: int, what: str) -> PlanError:
    return PlanError(f"schedule: tick {tick}, stage {stage}: {what}")
