"""What hardware leaves out of a copy between global memory and tiled shared memory.

The copy engine sees the array in global memory as `[rows / 8, columns / c, 8, c]`, tiled as shared
memory is, and takes a box of whole tiles from `(row // 8, column // c, row % 8, column % c)` on. It
carries from no dim into another: with `row % 8 = m`, the last m rows of each tile of the box are
beyond the tile in global memory. They are read as zeros and are not written, and nobody says so.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from colossax.compat import tile_of, window


@dataclasses.dataclass(frozen=True)
class Box:
    """Part of an array in global memory that is copied to or from tiled shared memory.

    Attributes:
        shape: Of the matrix.
        tile: Of shared memory.
        offsets: Where in a tile of global memory it starts, a number of each dim.
    """

    shape: tuple[int, ...]
    tile: tuple[int, ...]
    offsets: tuple[Any, ...]

    @classmethod
    def of(cls, there: Any, here: Any) -> "Box | None":
        """Of references to global and shared memory; None where all of it is sure to be copied."""
        tile = tile_of(here)
        if tile is None:
            return None
        dims = window(there)[-len(tile) :]
        for size, edge in zip((size for size, _ in dims), tile, strict=True):
            assert size % edge == 0, f"{size} in global memory are no multiple of a tile's {edge}"
        offsets = (
            start % edge if isinstance(start, int) else jax.lax.rem(start, jnp.int32(edge))
            for (_, start), edge in zip(dims, tile, strict=True)
        )
        box = cls(here.shape, tile, tuple(offsets))
        return None if all(isinstance(x, int) and x == 0 for x in box.offsets) else box

    def is_cut(self) -> Any:
        """Whether some of it is left out."""
        return sum(self.offsets) != 0

    def copied(self) -> jax.Array:
        """Which of its items are not left out."""
        mask = jnp.ones(self.shape, bool)
        for dim, (edge, offset) in enumerate(zip(self.tile, self.offsets, strict=True)):
            index = jax.lax.broadcasted_iota(jnp.int32, self.shape, dim)
            mask &= jax.lax.rem(index, jnp.int32(edge)) + offset < edge
        return mask
