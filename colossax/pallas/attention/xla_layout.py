"""Arrays and masks cut into tiles, and which tiles see one another."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from colossax.pallas.attention.xla_tile import Tiles, Tokens
from colossax.pallas.padding import pad_to_multiple

from .mask import Mask, positions


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TileRanges:
    """What a mask says of every tile of queries and keys.

    Attributes:
        rows: `Tokens` of the queries, tile by tile.
        columns: Those of the keys.
        bounds: Of `bounds`: the key tiles that each query tile visits, or None.
        tiles: The tiles.
        lengths: Queries and keys of a row.
    """

    rows: Any
    columns: Any
    bounds: Any
    tiles: Tiles = dataclasses.field(metadata={"static": True})
    lengths: tuple[int, int] = dataclasses.field(metadata={"static": True})


def fold(x: Array, kv_heads: int) -> Array:
    """`[b, L, n, h]` as `[b, k, g L, h]`."""
    b, L, n, h = x.shape
    grouped = x.reshape(b, L, kv_heads, n // kv_heads, h)
    return grouped.transpose(0, 2, 3, 1, 4).reshape(b, kv_heads, n // kv_heads * L, h)


def unfold(x: Array) -> Array:
    """`[b, k, g, L, h]` as `[b, L, n, h]`."""
    b, kv_heads, g, L, h = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(b, L, kv_heads * g, h)


def unfold_transposed(x: Array, length: int) -> Array:
    """`[b, k, h, g L]` as `[b, L, n, h]`."""
    b, kv_heads, h, m = x.shape
    split = x.reshape(b, kv_heads, h, m // length, length)
    return split.transpose(0, 4, 1, 3, 2).reshape(b, length, -1, h)


def tiled(x: Array, axis: int, tile: int, **how: Any) -> Array:
    """`x` with `axis` cut into tiles, their number first; the last is filled up as `how` says."""
    x = pad_to_multiple(x, {axis: tile}, **how)
    cut = x.reshape(*x.shape[:axis], -1, tile, *x.shape[axis + 1 :])
    return jnp.moveaxis(cut, axis, 0)


def key_tiles(x: Array, tile: int) -> Array:
    """`[b, t, k, h]` as `[tiles, b, k, T, h]`."""
    return jnp.swapaxes(tiled(x, 1, tile), 2, 3)


def query_tiles(x: Array, kv_heads: int, tile: int) -> Array:
    """`[b, s, n, h]` as `[tiles, b, k, m, h]`."""
    return jax.vmap(functools.partial(fold, kv_heads=kv_heads))(tiled(x, 1, tile))


def row_tiles(x: Array, kv_heads: int, tile: int, **how: Any) -> Array:
    """`[b, n, s]` as `[tiles, b, k, m]`."""
    tiles = tiled(x, 2, tile, **how)
    return tiles.reshape(*tiles.shape[:2], kv_heads, -1)


def join(tiles: Array, axis: int, length: int) -> Array:
    """Undoes `tiled`."""
    x = jnp.moveaxis(tiles, 0, axis)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return jax.lax.slice_in_dim(x, 0, length, axis=axis)


def describe(tiles: Tiles, mask: Mask, s: int, t: int) -> tuple[Tokens, Tokens]:
    """The mask's rows and columns, tile by tile.

    Rows that fill the last tile have the last row's position and no segment; columns are invalid.
    """

    def cut(tile: int, position: Array, segment: Any, valid: Any) -> Tokens:
        return Tokens(
            position=tiled(position, 1, tile, mode="edge"),
            segment=None if segment is None else tiled(segment, 1, tile, constant_values=-1),
            valid=None if valid is None else tiled(valid, 1, tile, constant_values=False),
        )

    valid = mask.kv_valid
    if valid is None and t % tiles.kv_tile:
        valid = jnp.ones((1, t), bool)
    return (
        cut(tiles.q_tile, positions(mask.q_positions, s), mask.q_segments, None),
        cut(tiles.kv_tile, positions(mask.kv_positions, t), mask.kv_segments, valid),
    )


def bounds(mask: Mask, rows: Tokens, columns: Tokens) -> tuple[Array, Array] | None:
    """Per query tile the key tiles `[first, last)` outside of which no row of it sees a key.

    None for all of them, a number that the compiler knows, where the mask hides nothing. Decided
    from the least and greatest position and segment of each tile, so it never leaves a visible key
    out, whatever the order of tokens; it is tight where they ascend.
    """
    if mask.everything:
        return None
    q_low, q_high = (f(rows.position, axis=-1)[:, None] for f in (jnp.min, jnp.max))
    kv_low, kv_high = (f(columns.position, axis=-1)[None] for f in (jnp.min, jnp.max))
    possible = jnp.ones(jnp.broadcast_shapes(q_low.shape, kv_low.shape), bool)
    if mask.right is not None:
        possible &= kv_low <= q_high + mask.right
    if mask.left is not None:
        possible &= kv_high >= q_low - mask.left
    if mask.prefix is not None:
        possible |= kv_low < mask.prefix
    if rows.segment is not None:
        q_low, q_high = (x[:, None] for x in _segment_span(rows.segment))
        kv_low, kv_high = (x[None] for x in _segment_span(columns.segment))
        possible &= (kv_low <= q_high) & (kv_high >= q_low)
    if columns.valid is not None:
        possible &= jnp.any(columns.valid, axis=-1)[None]
    count = possible.shape[1]
    tiles = jnp.arange(count, dtype=jnp.int32)[:, None]
    first = jnp.min(jnp.where(possible, tiles, count), axis=(1, 2))
    return first, jnp.max(jnp.where(possible, tiles + 1, 0), axis=(1, 2))


def _segment_span(segment: Array) -> tuple[Array, Array]:
    """Least and greatest segment of each tile `[tiles, b]`, padding aside; empty: low > high."""
    above = jnp.where(segment < 0, np.iinfo(np.int32).max, segment)
    return jnp.min(above, axis=-1), jnp.max(jnp.maximum(segment, -1), axis=-1)
