"""How a record is cut into files, and which process writes which.

Three sizes, each a multiple of the next or a divisor of it in every dim:

- a *shard* is what one device holds (replicas counted once);
- a *file* is one chunk on disk, written by exactly one process. Files of a layer stack hold one
  layer each, so that a layer is readable alone and segments do not show;
- a *block* is the part of a file that can be read and verified by itself, so that another mesh
  reads little more than it needs. It is of one expert, where a dim counts experts: so each is
  readable alone, however small, and there are no more files for it.

A file is a shard, unless shards are small: then those of one process are merged; or large: then
they are cut, outermost dim first, so that what is written lies in one run of memory.
"""

import dataclasses
import itertools
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from colossax.checkpoint.slots import ArraySlot, Box, box_shape

MERGE_BYTES = 4 << 20
"""Small shards are merged into files of at most this size."""

FILE_BYTES = 32 << 20
"""Large shards are cut into files of about this size."""

BLOCK_BYTES = 2 << 20
"""Files are readable in blocks of about this size."""

Shards = Mapping[Box, frozenset[int]]
"""Each distinct shard of an array, with the processes that hold a copy."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Shape of a record's files and of the blocks within them."""

    file: tuple[int, ...]
    block: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """Neighbouring shards of one array whose files one process writes.

    Attributes:
        array: Position of the array among those saved.
        box: Region of the record.
        parts: The shards that make it up.
        owner: Process that writes it; it holds every part.
    """

    array: int
    box: Box
    parts: tuple[Box, ...]
    owner: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordPlan:
    """Everything a process must know to write its part of one record."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    layered: bool
    experts: int | None
    layout: Layout
    tiles: tuple[Tile, ...]


def shards_of(slot: ArraySlot, sharding: jax.sharding.Sharding) -> Shards:
    """Shards of an array over all processes."""
    holders: dict[Box, set[int]] = {}
    for device, index in sharding.devices_indices_map(slot.array_shape).items():
        holders.setdefault(slot.box(index), set()).add(device.process_index)
    return {box: frozenset(processes) for box, processes in holders.items()}


def plan_records(
    arrays: Sequence[tuple[ArraySlot, jax.sharding.Sharding]],
) -> list[RecordPlan]:
    """Cut the records that these arrays make up, the same on every process.

    Raises:
        ValueError: The arrays of a record disagree, overlap or leave layers out.
    """
    records: dict[str, list[int]] = {}
    for position, (slot, _) in enumerate(arrays):
        records.setdefault(slot.name, []).append(position)
    return [
        plan_record([(i, arrays[i][0], shards_of(*arrays[i])) for i in positions])
        for positions in records.values()
    ]


def plan_record(members: Sequence[tuple[int, ArraySlot, Shards]]) -> RecordPlan:
    """Cut one record, given its arrays' positions, slots and shards."""
    slots = [slot for _, slot, _ in members]
    check_coverage(slots)
    first = slots[0]
    segments = [shards for _, _, shards in members]
    layout = choose_layout(first.shape, first.dtype, first.layered, segments, experts=first.experts)
    tiles = tuple(
        tile
        for position, slot, shards in members
        for tile in _tiles(position, slot, shards, layout.file)
    )
    return RecordPlan(
        name=first.name,
        shape=first.shape,
        dtype=first.dtype,
        layered=first.layered,
        experts=first.experts,
        layout=layout,
        tiles=tiles,
    )


def files_within(box: Box, file: tuple[int, ...]) -> Iterator[Box]:
    """Regions of the files that make up a box, which starts where a file does."""
    starts = [range(low, high, size) for (low, high), size in zip(box, file, strict=True)]
    for corner in itertools.product(*starts):
        yield tuple(
            (start, min(start + size, high))
            for start, size, (_, high) in zip(corner, file, box, strict=True)
        )


def check_coverage(slots: Sequence[ArraySlot]) -> None:
    """Refuse arrays that do not make up one whole record.

    Raises:
        ValueError: They disagree about it, overlap, or leave layers out.
    """
    first = slots[0]
    for slot in slots:
        if _kind(slot) != _kind(first):
            raise ValueError(
                f"{first.name}: its arrays disagree, {first.dtype}{list(first.shape)} and "
                f"{slot.dtype}{list(slot.shape)}"
            )
    if not first.layered:
        if len(slots) > 1:
            raise ValueError(f"{first.name}: given {len(slots)} times")
        return
    given = sorted(slot.box()[0] for slot in slots)
    ends = [0, *(stop for _, stop in given)]
    if [start for start, _ in given] != ends[:-1] or ends[-1] != first.shape[0]:
        raise ValueError(
            f"{first.name}: layers {given} do not make up the {first.shape[0]} layers of the record"
        )


def _kind(slot: ArraySlot) -> tuple[Any, ...]:
    return slot.shape, slot.dtype, slot.layered, slot.experts


def choose_layout(
    shape: tuple[int, ...],
    dtype: np.dtype,
    layered: bool,
    segments: Sequence[Shards],
    *,
    experts: int | None = None,
) -> Layout:
    """Shape of files and blocks such that no file needs more than one process.

    Args:
        shape: Of the record.
        dtype: Of the record.
        layered: Whether dim 0 counts layers; files then hold one layer.
        segments: Shards of each array of the record.
        experts: Dim that counts experts; blocks then hold one expert or a part of it.
    """
    item = max(1, dtype.itemsize)
    cuts = [_cut_segment(shape, item, layered, shards) for shards in segments]
    file = tuple(
        _common(size, [(shard[d], cut[d]) for shard, cut in cuts]) for d, size in enumerate(shape)
    )
    return Layout(file=file, block=_block_shape(file, item, experts))


def _common(size: int, cuts: Sequence[tuple[int, int]]) -> int:
    """One file size along a dim for segments that were cut differently."""
    sharded = {cut for cut in cuts if cut[0] < size}
    if not sharded:
        return min(file for _, file in cuts)
    if len(set(cuts)) == 1:
        return cuts[0][1]
    return math.gcd(*(number for cut in sharded for number in cut))


def _cut_segment(
    shape: tuple[int, ...], item: int, layered: bool, shards: Shards
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of a segment's shards and of the files it would like; dim 0 of a stack is 1."""
    shapes = {box_shape(box)[layered:] for box in shards}
    if len(shapes) != 1:
        raise ValueError(f"unevenly sharded arrays cannot be saved: pieces {sorted(shapes)}")
    shard = ((1,) if layered else ()) + tuple(max(1, n) for n in shapes.pop())
    file = _merge(shape, shard, item, layered, shards)
    if math.prod(file) * item > FILE_BYTES:
        unsharded = tuple(p >= n for p, n in zip(shard, shape, strict=True))
        file = _split(file, unsharded, item, layered)
    return shard, file


def _merge(
    shape: tuple[int, ...], shard: tuple[int, ...], item: int, layered: bool, shards: Shards
) -> tuple[int, ...]:
    """Grow a small shard, innermost dim first, while one process holds all of each file."""
    file = list(shard)
    for d in reversed(range(int(layered), len(shape))):
        for factor in _divisors(shape[d] // shard[d])[:-1]:
            wider = [*file[:d], shard[d] * factor, *file[d + 1 :]]
            if math.prod(wider) * item <= MERGE_BYTES and _held(shards, wider, layered):
                file = wider
                break
    return tuple(file)


def _held(shards: Shards, tile: Sequence[int], layered: bool) -> bool:
    return all(holders for _, holders in _group(shards, tile, layered).values())


def _group(
    shards: Shards, tile: Sequence[int], layered: bool
) -> dict[tuple[int, ...], tuple[list[Box], frozenset[int]]]:
    """Shards by the tile they lie in, with the processes that hold all of the tile."""
    groups: dict[tuple[int, ...], tuple[list[Box], frozenset[int]]] = {}
    for box, holders in shards.items():
        key = tuple(
            box[d][0] if layered and d == 0 else box[d][0] // size for d, size in enumerate(tile)
        )
        parts, common = groups.get(key, ([], holders))
        groups[key] = ([*parts, box], common & holders)
    return groups


def _split(
    file: tuple[int, ...], unsharded: Sequence[bool], item: int, layered: bool
) -> tuple[int, ...]:
    """Cut a large file, outermost dim first, to about `FILE_BYTES`."""
    sizes = list(file)
    for d in range(int(layered), len(sizes)):
        excess = math.ceil(math.prod(sizes) * item / FILE_BYTES)
        if excess > 1:
            sizes[d] = _fit(sizes[d], math.ceil(sizes[d] / excess), unsharded[d])
    return tuple(sizes)


def _fit(size: int, want: int, unsharded: bool) -> int:
    """A size of at most about `want` that cuts `size` well.

    Divisors are best. A dim that is not sharded may end in a smaller file; one that is must be
    cut evenly, or not at all where only crumbs would do.
    """
    best = next(n for n in _divisors(size) if n <= want)
    if 2 * best >= want:
        return best
    if unsharded:
        return max(want // 128 * 128, min(want, 128))
    return best if 8 * best >= want else size


def _block_shape(file: tuple[int, ...], item: int, experts: int | None) -> tuple[int, ...]:
    """Cut a file's largest dims in turn, by small primes, to about `BLOCK_BYTES`."""
    sizes = list(file)
    if experts is not None:
        sizes[experts] = 1
    while math.prod(sizes) * item > BLOCK_BYTES:
        d = max(range(len(sizes)), key=lambda d: (_small_prime(sizes[d]) > 1, sizes[d]))
        if (prime := _small_prime(sizes[d])) == 1:
            break
        sizes[d] //= prime
    return tuple(sizes)


def _small_prime(size: int) -> int:
    return next((p for p in (2, 3, 5, 7, 11, 13) if size % p == 0), 1)


def _divisors(size: int) -> list[int]:
    """All divisors, largest first."""
    small = [n for n in range(1, math.isqrt(size) + 1) if size % n == 0]
    return sorted({*small, *(size // n for n in small)}, reverse=True) or [1]


def _tiles(position: int, slot: ArraySlot, shards: Shards, file: tuple[int, ...]) -> Iterator[Tile]:
    """Group an array's shards so that each file lies within one tile; give each an owner.

    Replicated shards are dealt out over the processes that hold them, by a hash all agree on.
    """
    if 0 in slot.shape:
        return
    shard = box_shape(next(iter(shards)))
    size = [
        p if p % f == 0 or p == n else f for p, f, n in zip(shard, file, slot.shape, strict=True)
    ]
    for parts, holders in _group(shards, size, slot.layered).values():
        box = tuple(
            (min(p[d][0] for p in parts), max(p[d][1] for p in parts)) for d in range(len(size))
        )
        choices = sorted(holders)
        owner = choices[zlib.crc32(f"{slot.name}{box}".encode()) % len(choices)]
        yield Tile(array=position, box=box, parts=tuple(parts), owner=owner)
