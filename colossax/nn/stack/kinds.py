"""Stacks of several kinds of layers: what repeats in their order, and where rows lie."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Sequence

from colossax.config import Segment
from colossax.offload import segment_counts

_MADE: contextvars.ContextVar[list[int] | None] = contextvars.ContextVar("made", default=None)


@contextlib.contextmanager
def counting_layers() -> Iterator[None]:
    """While a model is made: layers of its stacks are numbered through, as the stacks are made."""
    token = _MADE.set([])
    try:
        yield
    finally:
        _MADE.reset(token)


def layers_before(layers: int) -> int:
    """Of a stack that is made now with so many layers: how many those before it have."""
    made = _MADE.get()
    if made is None:
        return 0
    made.append(layers)
    return sum(made[:-1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stretch:
    """Layers that are kept and run together: some of one kind, or groups that repeat.

    Attributes:
        first: Number of its first layer in the stack.
        group: Kinds in the order of one group, each with how many of it stand in a row.
        repeats: How often the group comes.
        rows: By kind, the number of its first layer here among all of its kind.
        policy: What the plan says of the segment that the stretch is a part of.
    """

    first: int
    group: tuple[tuple[str, int], ...]
    repeats: int
    rows: tuple[tuple[str, int], ...]
    policy: Segment

    @property
    def group_size(self) -> int:
        """Layers of one group."""
        return sum(size for _, size in self.group)

    @property
    def count(self) -> int:
        """Layers of the stretch."""
        return self.repeats * self.group_size

    def first_row(self, kind: str) -> int:
        """Number of a kind's first layer here, among all of its kind."""
        return dict(self.rows)[kind]

    def per_group(self, kind: str) -> int:
        """Layers of a kind in one group."""
        return sum(size for name, size in self.group if name == kind)

    def numbers(self, kind: str) -> list[int]:
        """Numbers in the stack of a kind's layers."""
        order = [name for name, size in self.group for _ in range(size)] * self.repeats
        return [self.first + i for i, name in enumerate(order) if name == kind]

    @property
    def place(self) -> tuple[int, bool, bool]:
        """What cannot change once it is built: how many layers, what of them the host has."""
        placement = self.policy.placement
        return self.count, placement.params_on_host, placement.experts_alone


def stretches(order: Sequence[str], segments: tuple[Segment, ...]) -> tuple[Stretch, ...]:
    """A stack's layers as stretches, none of which crosses the end of a segment.

    Args:
        order: The kind of each layer.
        segments: Of the plan, over all layers of all kinds.

    Raises:
        PlanError: The counts of the segments do not cover the layers.

    Cost: layers squared comparisons, at worst.
    """
    result, first, rows = [], 0, dict.fromkeys(order, 0)
    for segment, count in zip(segments, segment_counts(segments, len(order)), strict=True):
        end = first + count
        while first < end:
            group, repeats = _repeating(order[first:end])
            stretch = Stretch(
                first=first, group=group, repeats=repeats, rows=tuple(rows.items()), policy=segment
            )
            for kind in rows:
                rows[kind] += repeats * stretch.per_group(kind)
            result.append(stretch)
            first += stretch.count
    return tuple(result)


def _repeating(order: Sequence[str]) -> tuple[tuple[tuple[str, int], ...], int]:
    """The group that layers begin with, and how often it comes: what covers most of them.

    Of equal layers in a row the group is all of them, once.
    """
    best, covered = 1, _repeats(order, 1)
    for size in range(2, len(order) // 2 + 1):
        times = _repeats(order, size)
        if times > 1 and size * times > covered:
            best, covered = size, size * times
    if best == 1:
        return ((order[0], covered),), 1
    return _in_rows(order[:best]), covered // best


def _repeats(order: Sequence[str], size: int) -> int:
    """How often the first so many come, one after another."""
    times = 1
    while list(order[times * size : (times + 1) * size]) == list(order[:size]):
        times += 1
    return times


def _in_rows(order: Sequence[str]) -> tuple[tuple[str, int], ...]:
    runs: list[tuple[str, int]] = []
    for kind in order:
        if runs and runs[-1][0] == kind:
            runs[-1] = (kind, runs[-1][1] + 1)
        else:
            runs.append((kind, 1))
    return tuple(runs)
