"""What `colossax inspect` says of stages that have programs of their own."""

from collections.abc import Callable
from typing import Any

from colossax.planner import Edge, ProgramsCost, StageFacts

_GIB, _GB = 2**30, 1e9

_SMALL_BYTES = 10**6
"""Sums and square norms go from every stage to every other one; they are not told."""

Columns = Callable[[list[tuple[str, ...]]], list[str]]


def stage_lines(cost: Any, columns: Columns) -> list[str]:
    """A line for each stage and each edge; of one program for all stages nothing.

    Args:
        cost: The `pipeline` of an inspection.
        columns: Lays rows out.
    """
    if not isinstance(cost, ProgramsCost):
        return []
    edges = [edge for edge in cost.edges if edge.bytes >= _SMALL_BYTES]
    return [
        "",
        "stages, GiB of each device:",
        *columns([_HEAD, *map(_stage, cost.stages)]),
        *cost.refusals,
        "sent between stages in a step, by each device, in no collective:",
        *(columns([_EDGE_HEAD, *map(_edge, edges)]) if edges else ["  little"]),
        *(cost.crossings.lines if cost.crossings else []),
        "below: memory of the fullest stage, collectives of the one that sends most",
    ]


_HEAD = (
    "stage",
    "layers",
    "in all",
    "parameters",
    "optimizer",
    "gradients",
    "kept",
    "temporaries",
    "most in",
    "TFLOPs",
    "ring GB",
)

_EDGE_HEAD = ("from", "to", "arrays", "GB", "link", "seconds")


def _stage(one: StageFacts) -> tuple[str, ...]:
    most = one.most
    kept = most.get("kept for backward", 0) + most.get("kept for weight gradients", 0)
    sizes = (
        one.memory.total_bytes,
        most.get("parameters", 0),
        most.get("optimizer", 0),
        most.get("gradients", 0),
        kept,
        max(one.temporaries.values()),
    )
    return (
        str(one.number),
        ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in one.layers),
        *(f"{size / _GIB:.2f}" for size in sizes),
        one.busiest.replace("_", " "),
        f"{one.flops / 1e12:,.0f}",
        f"{one.ring_bytes / _GB:.2f}",
    )


def _edge(one: Edge) -> tuple[str, ...]:
    return (
        str(one.origin),
        str(one.end),
        str(one.messages),
        f"{one.bytes / _GB:.3f}",
        one.link,
        f"{one.seconds:.4f}",
    )
