"""Splits: which mesh axes cut which dim of an array, and how a device gets from one to another."""

from collections.abc import Collection, Iterable

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from colossax.errors import PlanError

Axes = tuple[str, ...]
Split = tuple[Axes, ...]
"""Mesh axes per dim, outer first; a PartitionSpec whose entries are all tuples."""


def split_of(spec: PartitionSpec) -> Split:
    """The entries of a PartitionSpec as tuples."""
    return tuple((entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec)


def spec_of(split: Split) -> PartitionSpec:
    """The PartitionSpec of a split."""
    return PartitionSpec(*(axes or None for axes in split))


def axes_of(split: Iterable[Axes]) -> Axes:
    """All axes of a split."""
    return tuple(axis for axes in split for axis in axes)


def without(split: Split, axes: Collection[str]) -> Split:
    """The split less some axes."""
    return tuple(tuple(axis for axis in entry if axis not in axes) for entry in split)


def nested(have: Split, want: Split) -> bool:
    """Whether, dim by dim, a block of one is a block of a block of the other."""
    return all(_begins(*pair) for pair in zip(have, want, strict=True))


def _begins(one: Axes, other: Axes) -> bool:
    return shared(one, other) in (one, other)


def shared(one: Axes, other: Axes) -> Axes:
    """The axes with which both begin."""
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return one[:count]


def check_nested(have: Split, want: Split, *, name: str) -> None:
    """Refuse to get from one split to another where the blocks of a device do not nest.

    Raises:
        PlanError: On some dim neither split begins with the other.
    """
    for at, (one, other) in enumerate(zip(have, want, strict=True)):
        if not _begins(one, other):
            raise PlanError(
                f"{name}: dim {at} lies over mesh axes {one} where the matmul wants {other}, which"
                f" is no block of it; let the rule name first the axes that both have"
            )


def move_local(x: Array, have: Split, want: Split, *, partial: Collection[str] = ()) -> Array:
    """A device's block under `have`, as its block under `want`, summed over `partial`.

    Where a dim gains axes, sums over them are reduce-scattered and what they share is sliced; the
    other sums are all-reduced, of the smaller blocks; then dims that lose axes are all-gathered.

    Cost: per device, in blocks of the larger split over g devices: `(g - 1) / g` by each gather
    and scatter, `2 (g - 1) / g` by each sum.
    """
    for dim, (old, new) in enumerate(zip(have, want, strict=True)):
        for run, summed in _runs(new[len(old) :], partial):
            x = _scatter_local(x, run, dim) if summed else _slice_local(x, run, dim)
    rest = tuple(axis for axis in partial if axis not in axes_of(want))
    if rest:
        x = jax.lax.psum(x, rest)
    for dim, (old, new) in enumerate(zip(have, want, strict=True)):
        if old[len(new) :]:
            x = jax.lax.all_gather(x, old[len(new) :], axis=dim, tiled=True)
    return x


def turn_local(x: Array, have: Split, want: Split, *, partial: Collection[str] = ()) -> Array:
    """`move_local` of something small, by way of all of it where blocks do not nest."""
    if nested(have, want):
        return move_local(x, have, want, partial=partial)
    replicated = ((),) * len(have)
    return move_local(move_local(x, have, replicated), replicated, want, partial=partial)


def _scatter_local(x: Array, axes: Axes, dim: int) -> Array:
    return jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)


def _slice_local(x: Array, axes: Axes, dim: int) -> Array:
    """This device's block of a dim that all devices along the axes hold whole."""
    size = x.shape[dim] // jax.lax.axis_size(axes)
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * size, size, dim)


def _runs(axes: Axes, partial: Collection[str]) -> list[tuple[Axes, bool]]:
    """Neighbouring axes, those to be summed apart from the others."""
    runs: list[tuple[Axes, bool]] = []
    for axis in axes:
        summed = axis in partial
        if runs and runs[-1][1] == summed:
            runs[-1] = ((*runs[-1][0], axis), summed)
        else:
            runs.append(((axis,), summed))
    return runs
