"""Which devices take part in a collective, and which mesh axes that is."""

import itertools
import math
import re
from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from colossax.aot.hlo import matching, split_top

_SIZE = re.compile(r"'?([^',]+?)'?=(\d+)")
Groups = tuple[tuple[int, ...], ...]
"""Devices that exchange with each other, as positions in the program's device list."""


def parse_groups(attributes: str, devices: int) -> Groups:
    """The `replica_groups` of an instruction, in any of the forms the compiler writes.

    `{{0,1},{2,3}}`, `[2,2]<=[4]`, `[2,2]<=[2,2]T(1,0)`, `mesh['x'=2,'y'=2] {'x'}` (also with
    `device_ids=(...)` and parts of an axis, `'x':(1)2`), and `{}` for all devices.

    Args:
        attributes: Text behind the operands.
        devices: Devices of the program.

    Raises:
        ValueError: A form that is not known, or no groups at all.
    """
    start = attributes.find("replica_groups=")
    if start < 0:
        raise ValueError(f"collective without replica_groups: {attributes[:120]!r}")
    text = attributes[start + len("replica_groups=") :]
    if text.startswith("{"):
        return _listed(text[: matching(text, 0) + 1], devices)
    if text.startswith("["):
        return _iota(text)
    if text.startswith("mesh["):
        return _by_mesh(text)
    raise ValueError(f"replica_groups in an unknown form: {text[:120]!r}")


def parse_pairs(attributes: str) -> tuple[tuple[int, int], ...]:
    """The `source_target_pairs` of a permute.

    Raises:
        ValueError: There are none, or in an unknown form.
    """
    start = attributes.find("source_target_pairs={")
    if start < 0:
        raise ValueError(f"permute without source_target_pairs: {attributes[:120]!r}")
    text = attributes[start + len("source_target_pairs=") :]
    if text.startswith("{}"):
        return ()
    pairs = _listed(text[: matching(text, 0) + 1], 0)
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"source_target_pairs in an unknown form: {text[:120]!r}")
    return tuple((first, second) for first, second in pairs)


def groups_of_pairs(pairs: Sequence[tuple[int, int]]) -> Groups:
    """Devices that a permute connects, directly or through others."""
    groups: list[set[int]] = []
    for pair in pairs:
        touched = [group for group in groups if group.intersection(pair)]
        joined = set(pair).union(*touched)
        groups = [group for group in groups if group not in touched] + [joined]
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def axes_of(groups: Groups, mesh: Mesh) -> tuple[str, ...]:
    """The mesh axes, outer first, whose devices these groups are; empty where there are none.

    A permute may leave some devices out: its groups need only lie within those of the axes.
    """
    sizes = {axis: size for axis, size in mesh.shape.items() if size > 1}
    partition = {frozenset(group) for group in groups if len(group) > 1}
    if not partition:
        return ()
    for count in range(1, len(sizes) + 1):
        for axes in itertools.combinations(sizes, count):
            if _along(mesh, axes) == partition:
                return axes
    return ()


def smallest_axes(groups: Groups, mesh: Mesh) -> tuple[str, ...]:
    """The fewest mesh axes within which all of these groups lie."""
    sizes = [axis for axis, size in mesh.shape.items() if size > 1]
    for count in range(1, len(sizes) + 1):
        for axes in itertools.combinations(sizes, count):
            blocks = _along(mesh, axes)
            if all(any(block.issuperset(group) for block in blocks) for group in groups):
                return axes
    return ()


def _along(mesh: Mesh, axes: Sequence[str]) -> set[frozenset[int]]:
    """Positions of devices that differ along these axes alone."""
    positions = np.arange(mesh.devices.size).reshape(mesh.devices.shape)
    order = [mesh.axis_names.index(axis) for axis in axes]
    width = math.prod(mesh.shape[axis] for axis in axes)
    last = np.moveaxis(positions, order, range(-len(order), 0)).reshape(-1, width)
    return {frozenset(row.tolist()) for row in last}


def _listed(text: str, devices: int) -> Groups:
    inner = split_top(text[1:-1])
    if not inner:
        return (tuple(range(devices)),)
    if not all(re.fullmatch(r"\{[\d,\s]*\}", part) for part in inner):
        raise ValueError(f"groups in an unknown form: {text[:120]!r}")
    return tuple(tuple(int(n) for n in re.findall(r"\d+", part)) for part in inner)


def _iota(text: str) -> Groups:
    match = re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if match is None:
        raise ValueError(f"groups in an unknown form: {text[:120]!r}")
    shape = _ints(match.group(1))
    rows = _transposed(match.group(2), match.group(3)).reshape(shape[0], -1)
    return tuple(tuple(row) for row in rows.tolist())


def _by_mesh(text: str) -> Groups:
    match = re.match(r"mesh\[([^\]]*)\](?:, device_ids=\(([^{]*)\))? ?\{([^}]*)\}", text)
    if match is None:
        raise ValueError(f"groups in an unknown form: {text[:120]!r}")
    sizes = {name: int(size) for name, size in _SIZE.findall(match.group(1))}
    chosen = [_axis_part(word, sizes) for word in split_top(match.group(3))]
    labels: list[tuple[str, int]] = []
    shape: list[int] = []
    for name, size in sizes.items():
        ends = [end for axis, low, high in chosen if axis == name for end in (low, high)]
        for low, high in itertools.pairwise(sorted({1, size, *ends})):
            labels.append((name, low))
            shape.append(high // low)
    inside = [
        at
        for axis, low, high in chosen
        for at, (name, start) in enumerate(labels)
        if name == axis and low <= start < high
    ]
    grid = _device_ids(match.group(2), math.prod(sizes.values())).reshape(shape)
    width = math.prod(shape[at] for at in inside)
    rows = np.moveaxis(grid, inside, range(-len(inside), 0)).reshape(-1, width)
    return tuple(tuple(row) for row in rows.tolist())


def _axis_part(word: str, sizes: dict[str, int]) -> tuple[str, int, int]:
    """Name and span of `'x'` or `'x':(2)4`: the part of 4 behind an outer part of 2."""
    part = re.fullmatch(r"'?([^':]+)'?(?::\((\d+)\)(\d+))?", word)
    if part is None or part.group(1) not in sizes:
        raise ValueError(f"groups name an unknown axis: {word!r} of {sizes}")
    name, before, width = part.groups()
    low = int(before or 1)
    return name, low, low * int(width or sizes[name])


def _device_ids(text: str | None, count: int) -> np.ndarray:
    if not text:
        return np.arange(count)
    iota = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if iota is not None:
        return _transposed(iota.group(1), iota.group(2))
    if not re.fullmatch(r"[\d,\s]+", text):
        raise ValueError(f"device_ids in an unknown form: {text[:120]!r}")
    return np.asarray(_ints(text))


def _transposed(dims: str, order: str | None) -> np.ndarray:
    grid = np.arange(int(np.prod(_ints(dims)))).reshape(_ints(dims))
    return grid.transpose(_ints(order)) if order else grid


def _ints(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]
