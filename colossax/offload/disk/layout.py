"""Where each array of a record lies, and how records of another layout are told apart."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from colossax.errors import OffloadError

BLOCK_BYTES = 4096
"""What files are read and written in: a multiple of what disks ask for."""

ArraySpec = tuple[tuple[int, ...], np.dtype]
"""Shape and dtype of one array of a record."""


@dataclasses.dataclass(frozen=True)
class RecordLayout:
    """The named arrays of one record, each beginning on a block.

    Attributes:
        arrays: Shape and dtype by name, in their order in the record.
    """

    arrays: Mapping[str, ArraySpec]

    def __post_init__(self) -> None:
        for name, (shape, dtype) in self.arrays.items():
            if dtype.hasobject or dtype.fields or dtype.subdtype or not dtype.isnative:
                raise OffloadError(
                    f"array '{name}' has dtype {dtype}, which a disk store cannot hold; give it "
                    "plain numbers in this machine's byte order"
                )
            if any(size < 0 for size in shape):
                raise OffloadError(f"array '{name}' has shape {shape}; sizes must not be negative")

    @classmethod
    def of(cls, arrays: Mapping[str, Any]) -> "RecordLayout":
        """Layout of arrays, or of anything else with a shape and a dtype."""
        return cls({name: (tuple(x.shape), np.dtype(x.dtype)) for name, x in arrays.items()})

    def offsets(self) -> dict[str, int]:
        """Byte within the payload at which each array begins, a multiple of `BLOCK_BYTES`."""
        offsets, end = {}, 0
        for name, (shape, dtype) in self.arrays.items():
            offsets[name] = end
            end += in_blocks(math.prod(shape) * dtype.itemsize)
        return offsets

    @property
    def payload_bytes(self) -> int:
        """Bytes of one record, every array padded to whole blocks."""
        return sum(in_blocks(math.prod(s) * d.itemsize) for s, d in self.arrays.values())

    @property
    def slot_bytes(self) -> int:
        """Bytes of one record of one epoch in a file: a block that describes it, its payload."""
        return BLOCK_BYTES + self.payload_bytes

    def views(self, payload: np.ndarray) -> dict[str, np.ndarray]:
        """The arrays within a payload, uint8[payload_bytes], by name; nothing is copied."""
        offsets = self.offsets()
        return {
            name: np.ndarray(shape, dtype, buffer=payload.data, offset=offsets[name])
            if math.prod(shape)
            else np.empty(shape, dtype)
            for name, (shape, dtype) in self.arrays.items()
        }

    def rows(self) -> list[list[Any]]:
        """Name, shape and dtype's name of each array, as JSON keeps them."""
        return [[name, list(shape), dtype.name] for name, (shape, dtype) in self.arrays.items()]

    def difference(self, stored: list[list[Any]]) -> str | None:
        """What first sets this layout apart from a stored one's rows, None where nothing does.

        The order of the arrays does not count.
        """
        asked = {name: [name, *rest] for name, *rest in self.rows()}
        for row in stored:
            want = asked.pop(row[0], None)
            if want is None:
                return f"array '{row[0]}' {_shown(row)} is in the file and was not asked for"
            if want != row:
                return f"array '{row[0]}' is {_shown(row)} in the file, asked for as {_shown(want)}"
        for name, row in asked.items():
            return f"array '{name}' {_shown(row)} is not in the file"
        return None

    def in_order_of(self, stored: list[list[Any]]) -> "RecordLayout":
        """The same arrays in the order of a stored layout without a difference."""
        return type(self)({name: self.arrays[name] for name, _, _ in stored})


def in_blocks(size_bytes: int) -> int:
    """Bytes rounded up to whole blocks."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


def _shown(row: list[Any]) -> str:
    return f"{row[2]}{row[1]}"
