"""Biases tile by tile: read at their own shape, their gradients summed up at it too.

One that is an array is `[1 or b, 1 or n, 1 or s, 1 or t]`. No function here makes a larger array of
it than one tile of scores: b batch, k kv heads, g query heads per kv head, L queries and T keys of
a tile.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from colossax.pallas.padding import pad_to_multiple
from colossax.pallas.varying import zeros_like_varying

from .relative import RelativeBias


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where a tile of scores lies.

    Attributes:
        i: Index of its query tile, of `q_tile` queries.
        j: Index of its key tile, of `kv_tile` keys.
        q_position: Positions of its queries `[b or 1, L]`.
        kv_position: Those of its keys.
    """

    i: Any
    j: Any
    q_tile: int
    kv_tile: int
    q_position: Any
    kv_position: Any

    def of(self, x: Array) -> tuple[list[Any], tuple[int, ...]]:
        """First index and size of the part of a filled up bias that this tile reads."""
        rows, columns = x.shape[2:]
        zero = jnp.zeros((), jnp.int32)
        row = zero if rows == 1 else self.i * self.q_tile
        column = zero if columns == 1 else self.j * self.kv_tile
        size = (*x.shape[:2], min(rows, self.q_tile), min(columns, self.kv_tile))
        return [zero, zero, row, column], size


def fill_up(bias: Any, q_tile: int, kv_tile: int) -> Any:
    """The bias with zeros after its queries and its keys up to whole tiles; dims of 1 stay.

    Cost: a copy where there is something to fill up.
    """
    if isinstance(bias, RelativeBias):
        return bias
    tiles = {2: q_tile, 3: kv_tile}
    return pad_to_multiple(bias, {at: tile for at, tile in tiles.items() if bias.shape[at] > 1})


def zeros(bias: Any, like: Array) -> Any:
    """What `add` starts from, for a filled up bias: float32, varying as `like` does."""
    return jax.tree.map(lambda x: zeros_like_varying(x.shape, like), bias)


def cut_back(total: Any, bias: Any) -> Any:
    """What `add` summed up, in the bias's own shape and dtype."""
    if isinstance(bias, RelativeBias):
        return jax.tree.map(lambda x, param: x.astype(param.dtype), total, bias)
    return total[:, :, : bias.shape[2], : bias.shape[3]].astype(bias.dtype)


def read(bias: Any, place: Place, kv_heads: int, *, transposed: bool) -> Float[Array, "..."]:
    """What is added to scores `[b, k, g, L, T]` (transposed: `[b, k, T, g, L]`); dims may be 1."""
    if isinstance(bias, RelativeBias):
        where = place.q_position, place.kv_position
        return bias.tile(*where, kv_heads, transposed=transposed)
    tile = jax.lax.dynamic_slice(bias, *place.of(bias)).astype(jnp.float32)
    b, heads, rows, columns = tile.shape
    split = (1, 1) if heads == 1 else (kv_heads, heads // kv_heads)
    tile = tile.reshape(b, *split, rows, columns)
    return tile.transpose(0, 1, 4, 2, 3) if transposed else tile


def add(total: Any, bias: Any, place: Place, ds: Float[Array, "b k T g L"]) -> Any:
    """`total`, shaped as the filled up bias, with one tile's gradient of the logits added in place.

    What the tile shares an item of the bias among, it sums up first: batch rows, heads, queries or
    keys.
    """
    if isinstance(bias, RelativeBias):
        more = bias.gradient(place.q_position, place.kv_position, ds)
        return jax.tree.map(jnp.add, total, more)
    b, k, T, g, L = ds.shape
    start, size = place.of(total)
    wide = ds.transpose(0, 1, 3, 4, 2).reshape(b, k * g, L, T)
    shared = tuple(i for i, n in enumerate(size) if n == 1)
    more = jax.lax.dynamic_slice(total, start, size) + jnp.sum(wide, axis=shared, keepdims=True)
    return jax.lax.dynamic_update_slice(total, more, start)
