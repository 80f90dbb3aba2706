"""Grouped matmul in plain XLA: a loop over row tiles, each of one group.

`jax.lax.ragged_dot` lays out x once per group, with zeros in the rows of the others, where the
platform has nothing better (GPUs and CPUs): e times the FLOPs and the memory.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from colossax.pallas.target import Target
from colossax.pallas.varying import vary_alike

from .schedule import row_visits, visits_of_groups
from .spec import GroupedSpec

LARGEST_TILE = 256
SMALLEST_TILE = 16


def why_not(spec: GroupedSpec, target: Target) -> str | None:
    """It takes everything everywhere."""
    return None


def tile_rows(rows: int, groups: int) -> int:
    """Rows of a tile: about those of an even group, so that tiles are at most half empty."""
    even = max(rows // groups, 1)
    tile = 1 << (even.bit_length() - 1)
    return min(max(tile, SMALLEST_TILE), LARGEST_TILE, rows)


def multiply(
    x: Float[Array, "t k"],
    w: Float[Array, "e _ _"],
    group_sizes: Int[Array, " e"],
    *,
    transposed: bool = False,
) -> Float[Array, "t n"]:
    """`x_i @ w[i]` (`x_i @ w[i].T`) for every group i, zeros after the last.

    Cost: 2 (t + e r) k n FLOPs or less, r = `tile_rows`; temporary memory k n + r (k + n) items.
    """
    rows, groups = x.shape[0], w.shape[0]
    tile = tile_rows(rows, groups)
    visits = row_visits(group_sizes, rows, tile)
    dims = (((1,), (1 if transposed else 0,)), ((), ()))

    def visit(i: Array, out: Array) -> Array:
        group, first = visits.group[i], visits.first[i]
        here = jax.lax.dynamic_slice_in_dim(x, first, tile)
        weight = jax.lax.dynamic_index_in_dim(w, group, keepdims=False)
        product = jax.lax.dot_general(here, weight, dims, preferred_element_type=jnp.float32)
        mask = _row_mask(visits.low[i], visits.high[i], tile) & (group < groups)
        before = jax.lax.dynamic_slice_in_dim(out, first, tile)
        kept = jnp.where(mask, product.astype(x.dtype), before)
        return jax.lax.dynamic_update_slice_in_dim(out, kept, first, 0)

    out = jnp.zeros((rows, w.shape[1 if transposed else 2]), x.dtype)
    out, *_ = vary_alike((out, x, w, group_sizes))
    return jax.lax.fori_loop(0, visits_of_groups(visits, groups), visit, out)


def weight_gradient(
    x: Float[Array, "t d"],
    dy: Float[Array, "t f"],
    group_sizes: Int[Array, " e"],
    *,
    dtype: Any = None,
) -> Float[Array, "e d f"]:
    """`x_i.T @ dy_i` for every group i, summed in float32, in `dtype` or else x's.

    Cost: 2 (t + e r) d f FLOPs or less; temporary memory e d f float32 where x is narrower.
    """
    rows, groups = x.shape[0], group_sizes.shape[0]
    tile = tile_rows(rows, groups)
    visits = row_visits(group_sizes, rows, tile)

    def visit(i: Array, total: Array) -> Array:
        group, first = visits.group[i], visits.first[i]
        mask = _row_mask(visits.low[i], visits.high[i], tile) & (group < groups)
        # Both, as a row of another group may be infinite.
        kept_x, kept_dy = (
            jnp.where(mask, jax.lax.dynamic_slice_in_dim(z, first, tile), jnp.zeros((), z.dtype))
            for z in (x, dy)
        )
        product = jax.lax.dot_general(
            kept_x, kept_dy, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        return total.at[group].add(product, mode="drop")

    total = jnp.zeros((groups, x.shape[1], dy.shape[1]), jnp.float32)
    total, *_ = vary_alike((total, x, dy, group_sizes))
    return jax.lax.fori_loop(0, visits_of_groups(visits, groups), visit, total).astype(
        x.dtype if dtype is None else dtype
    )


def _row_mask(low: Array, high: Array, tile: int) -> Array:
    row = jnp.arange(tile, dtype=jnp.int32)[:, None]
    return (row >= low) & (row < high)
