"""Tables from the tick of each operation, or from the order of each stage."""

from collections.abc import Callable, Mapping, Sequence

from colossax.pipeline.table import Cell, Kind, Op, Table
from colossax.pipeline.values import Value, read, written

TickOf = Callable[[int, int, int], int]
"""The tick of an operation by its stage, chunk and microbatch."""

Layout = tuple[tuple[int, int], ...]


def placed(microbatches: int, layout: Layout, ticks_of: Mapping[Kind, TickOf]) -> Table:
    """The table in which each operation stands in the tick that the formula of its kind gives.

    Cost: O(operations + cells).
    """
    found = [
        (tick_of(stage, chunk, microbatch), stage, Op(kind, microbatch, chunk))
        for kind, tick_of in ticks_of.items()
        for stage, chunk in layout
        for microbatch in range(microbatches)
    ]
    stages, chunks = _sizes(layout)
    length = 1 + max(tick for tick, _, _ in found)
    cells: list[list[list[Op]]] = [[[] for _ in range(stages)] for _ in range(length)]
    for tick, stage, op in found:
        cells[tick][stage].append(op)
    ticks = tuple(tuple(map(tuple, row)) for row in cells)
    return Table(stages, microbatches, chunks, layout, ticks)


def packed(microbatches: int, layout: Layout, orders: Sequence[Sequence[Op]]) -> Table:
    """The table of at most one operation a cell in which each stage keeps its order.

    A stage does what comes next as soon as its inputs are there.

    Args:
        microbatches: How many.
        layout: Stage and chunk by position.
        orders: What each stage does, one after the other.

    Cost: O(operations + cells).
    """
    empty = Table(*_sizes(layout)[:1], microbatches, _sizes(layout)[1], layout, ())
    ahead = [0] * empty.stages
    done: set[Value] = set()
    ticks: list[tuple[Cell, ...]] = []
    while any(at < len(order) for at, order in zip(ahead, orders, strict=True)):
        cells = tuple(
            _next(empty, stage, order[at : at + 1], done)
            for stage, (at, order) in enumerate(zip(ahead, orders, strict=True))
        )
        assert any(cells), "the orders of the stages wait for one another"
        ahead = [at + len(cell) for at, cell in zip(ahead, cells, strict=True)]
        done.update(
            value
            for stage, cell in enumerate(cells)
            for op in cell
            if (value := written(op, empty.position(stage, op.chunk)))
        )
        ticks.append(cells)
    return Table(empty.stages, microbatches, empty.chunks, layout, tuple(ticks))


def _next(table: Table, stage: int, order: Sequence[Op], done: set[Value]) -> Cell:
    """The first operation of an order if what it reads is there, else nothing."""
    return tuple(
        op
        for op in order
        if done.issuperset(read(op, table.position(stage, op.chunk), len(table.layout)))
    )


def _sizes(layout: Layout) -> tuple[int, int]:
    """Stages and chunks."""
    return 1 + max(stage for stage, _ in layout), 1 + max(chunk for _, chunk in layout)
