"""One kind of collective that a step has, and sums of such."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Sent(NamedTuple):
    """Collectives of one kind along the same axes.

    Attributes:
        kind: As XLA calls it.
        axes: Mesh axes.
        bytes: That a device sends in a ring, a microbatch.
        times: How many collectives those are.
        hidden: Whether they wait for nothing that is computed just before, so that compute beside
            them can hide them.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: float
    times: float
    hidden: bool


def sent_along(
    kind: str, axes: Sequence[str], size: float, times: int | float, hidden: bool
) -> Sent:
    """One, of whatever numbers."""
    return Sent(kind=kind, axes=tuple(axes), bytes=float(size), times=float(times), hidden=hidden)


def times(found: Iterable[Sent], count: int | float) -> list[Sent]:
    """So often."""
    return [
        Sent(kind, axes, size * count, number * count, hidden)
        for kind, axes, size, number, hidden in found
    ]


def joined(found: Iterable[Sent]) -> tuple[Sent, ...]:
    """One of each kind along the same axes."""
    sums: dict[tuple, list[float]] = {}
    for one in found:
        total = sums.setdefault((one.kind, one.axes, one.hidden), [0.0, 0.0])
        total[0] += one.bytes
        total[1] += one.times
    return tuple(
        Sent(kind, axes, size, number, hidden)
        for (kind, axes, hidden), (size, number) in sums.items()
    )
