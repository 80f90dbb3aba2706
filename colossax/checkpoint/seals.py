"""Seals: what binds each file of a record to its place in a step.

Every block of a file ends in its CRC-32C, which says that its bytes are whole, and not that they
belong there. A seal is over those checksums, in order, and all that the place is: so a whole file
of another layer, record or step is told from the right one without reading its values.
"""

import itertools
import math
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from colossax.checkpoint.layout import Layout
from colossax.checkpoint.slots import Box

BYTE_ORDER = "little"

_CRC_BYTES = 4
_ENTRY = struct.Struct("<QQ")  # of a sharded file's index: where a block is, and its bytes

Place = tuple[int, ...]
"""Of a file in the grid of its record's files."""


def grid_of(shape: tuple[int, ...], file: tuple[int, ...]) -> tuple[int, ...]:
    """How many files a record has along each dim."""
    return tuple(-(-size // part) if size else 0 for size, part in zip(shape, file, strict=True))


def places_in(box: Box, file: tuple[int, ...]) -> Iterator[Place]:
    """Places of the files that a region touches, in C order."""
    spans = [
        range(low // part, -(-high // part)) if high > low else range(0)
        for (low, high), part in zip(box, file, strict=True)
    ]
    return itertools.product(*spans)


def number_in(grid: tuple[int, ...], place: Place) -> int:
    """Position of a place among all of a grid, in C order."""
    number = 0
    for size, at in zip(grid, place, strict=True):
        number = number * size + at
    return number


def file_at(folder: Path, place: Place) -> Path:
    """File of a record's folder."""
    return folder.joinpath("c", *map(str, place))


def file_bytes(layout: Layout, dtype: np.dtype) -> int:
    """Length of each file of a record: blocks are stored whole, at the record's edges too."""
    blocks = math.prod(_blocks(layout))
    stored = blocks * _block_bytes(layout, dtype)
    return stored if layout.block == layout.file else stored + blocks * _ENTRY.size + _CRC_BYTES


def check_length(path: Path, layout: Layout, dtype: np.dtype) -> None:
    """Refuse a file that cannot be what its record says.

    Raises:
        OSError: It is not there.
        ValueError: It has another length.
    """
    _check_length(path, path.stat().st_size, layout, dtype)


def header_of(step: int, record: str, dtype: np.dtype, layout: Layout) -> bytes:
    """What a seal says of the record that its file is of."""
    file, block = ("x".join(map(str, sizes)) for sizes in (layout.file, layout.block))
    return f"{step} {record} {dtype.name} {BYTE_ORDER} {file} {block}".encode()


def seal(header: bytes, folder: Path, place: Place, layout: Layout, dtype: np.dtype) -> int:
    """Seal of one file, as it lies on disk.

    Args:
        header: See `header_of`.
        folder: Of the record.
        place: Of the file in it.
        layout: Of the record's files.
        dtype: Of the record.

    Raises:
        OSError: It cannot be read.
        ValueError: It has another length, or lacks blocks.

    Cost: one system call for each of its blocks, and four; values are not read.
    """
    path = os.path.join(folder, "c", *map(str, place))
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        _check_length(path, os.fstat(handle).st_size, layout, dtype)
        ends = _ends(path, handle, layout, dtype)
        sums = b"".join(os.pread(handle, _CRC_BYTES, end - _CRC_BYTES) for end in ends)
    finally:
        os.close(handle)
    return zlib.crc32(b"%b %b %b" % (header, "/".join(map(str, place)).encode(), sums))


def _check_length(path: Path | str, found: int, layout: Layout, dtype: np.dtype) -> None:
    if found != (expected := file_bytes(layout, dtype)):
        raise ValueError(f"'{path}' has {found} bytes, not {expected}")


def _ends(path: str, handle: int, layout: Layout, dtype: np.dtype) -> Sequence[int]:
    """Where each block of a file ends, in order."""
    each = _block_bytes(layout, dtype)
    if layout.block == layout.file:
        return [each]
    blocks = math.prod(_blocks(layout))
    start = file_bytes(layout, dtype) - _CRC_BYTES - blocks * _ENTRY.size
    index = os.pread(handle, blocks * _ENTRY.size, start)
    return list(_ends_in(path, _ENTRY.iter_unpack(index), each, start))


def _ends_in(path: str, entries: Iterable[tuple[int, int]], each: int, most: int) -> Iterator[int]:
    for offset, size in entries:
        if size != each or offset + size > most:
            raise ValueError(f"'{path}' lacks a block")
        yield offset + size


def _blocks(layout: Layout) -> list[int]:
    return [file // block for file, block in zip(layout.file, layout.block, strict=True)]


def _block_bytes(layout: Layout, dtype: np.dtype) -> int:
    return math.prod(layout.block) * dtype.itemsize + _CRC_BYTES
