"""What the operations of a table read and write."""

from typing import NamedTuple

from colossax.pipeline.table import Kind, Op


class Value(NamedTuple):
    """What goes from operation to operation: the output of a position, or its input's gradient."""

    gradient: bool
    position: int
    microbatch: int


def written(op: Op, position: int) -> Value | None:
    """What an operation of a position leaves for others; None of weight gradients."""
    if op.kind is Kind.WEIGHT:
        return None
    return Value(op.kind is not Kind.FORWARD, position, op.microbatch)


def read(op: Op, position: int, positions: int) -> list[Value]:
    """What an operation of a position needs of others; `positions` is how many there are.

    A gradient needs that the chunk has gone forward, for it starts from the input kept then, and
    what the position behind sends back; a weight gradient, what its input's gradient left.
    """
    if op.kind is Kind.FORWARD:
        return [Value(False, position - 1, op.microbatch)] if position else []
    if op.kind is Kind.WEIGHT:
        return [Value(True, position, op.microbatch)]
    kept = Value(False, position, op.microbatch)
    behind = [Value(True, position + 1, op.microbatch)] if position + 1 < positions else []
    return [kept, *behind]
