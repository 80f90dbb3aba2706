"""Rows of a parameter table, by numbers that are spread over devices with the batch."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from colossax.config import BoundPlan
from colossax.sharding.context import current
from colossax.sharding.ops import (
    compute_dtype,
    gathered,
    laid_out,
    reduction_dtype,
    summed_gradient,
)
from colossax.sharding.rules import batch_axes, resolve
from colossax.typing import Dims


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Table:
    bound: BoundPlan | None
    dims: Dims
    rows: int
    width: int
    dtype: Any


def lookup(
    table: Float[Array, "rows d"], ids: Int[Array, "b s"], dims: Dims
) -> Float[Array, "b s d"]:
    """Rows of a parameter table, in the compute dtype.

    Where a device's tokens are fewer than the rows and d is split along axes of the batch, rows
    move and the table stays: each device looks up its part of d for the tokens of all devices
    along those axes, and one all-to-all hands the parts over; backward goes the same way and
    needs no reduction along them. Else the table is gathered, and its gradient summed up in
    float32 before it is reduced. Left to itself the compiler replicates one or the other.

    Args:
        table: Parameter at rest.
        ids: Row numbers; those beyond the table read its last row.
        dims: Logical dims of the table.

    Cost: sends `b s d` items per device forward and backward, or `rows d`, whichever is less.
    """
    rows, width = table.shape
    static = _Table(
        bound=current(), dims=tuple(dims), rows=rows, width=width, dtype=compute_dtype(table.dtype)
    )
    return _lookup(static, table, ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _lookup(static: _Table, table: Array, ids: Array) -> Array:
    axes = _split(static, "params")
    if not axes or not _moves(static, ids):
        whole = gathered(static.bound, static.dims, static.dtype, table)
        return whole.at[ids].get(mode="clip")

    def rows_local(table: Array, ids: Array) -> Array:
        ids = jax.lax.all_gather(ids, axes, axis=0, tiled=True)
        part = table.astype(static.dtype).at[ids].get(mode="clip")
        return jax.lax.all_to_all(part, axes, split_axis=0, concat_axis=2, tiled=True)

    batch = PartitionSpec(_batch(static.bound))
    return _mapped(static, rows_local, (PartitionSpec(None, axes), batch), batch)(table, ids)


def _lookup_fwd(static: _Table, table: Array, ids: Array):
    return _lookup(static, table, ids), (table, ids)


def _lookup_bwd(static: _Table, residuals: Any, dx: Array):
    table, ids = residuals
    if not _even(static, ids):
        total = _added(static.rows, ids, dx)
        if static.bound is not None and not static.bound.single:
            total = laid_out(static.bound, "weights", static.dims, total)
        return summed_gradient(static.bound, static.dims, total, table), None
    axes = _split(static, "gradients")
    rest = tuple(axis for axis in _batch(static.bound) if axis not in axes)
    moves = _moves(static, ids)
    # XLA's CPU backend dies of a bfloat16 sum inside a partly manual region, and would widen it.
    on_cpu = static.bound.mesh.devices.flat[0].platform == "cpu"  # type: ignore[union-attr]
    summed = jnp.float32 if on_cpu else reduction_dtype(static.bound, static.dtype)

    def sums_local(ids: Array, dx: Array) -> Array:
        if axes and moves:
            ids = jax.lax.all_gather(ids, axes, axis=0, tiled=True)
            dx = jax.lax.all_to_all(dx, axes, split_axis=2, concat_axis=0, tiled=True)
        total = _added(static.rows, ids, dx).astype(summed)
        if axes and not moves:
            total = jax.lax.psum_scatter(total, axes, scatter_dimension=1, tiled=True)
        return jax.lax.psum(total, rest) if rest else total

    batch = PartitionSpec(_batch(static.bound))
    total = _mapped(static, sums_local, (batch, batch), PartitionSpec(None, axes or None))(ids, dx)
    return summed_gradient(static.bound, static.dims, total, table), None


_lookup.defvjp(_lookup_fwd, _lookup_bwd)


def _added(rows: int, ids: Array, dx: Array) -> Array:
    zeros = jnp.zeros((rows, dx.shape[-1]), jnp.float32)
    return zeros.at[ids].add(dx.astype(jnp.float32), mode="clip")


def _batch(bound: BoundPlan | None) -> tuple[str, ...]:
    """Axes that split the batch, outer first."""
    if bound is None:
        return ()
    held = batch_axes(bound)
    return tuple(axis for axis in bound.mesh.axis_names if axis in held)


def _split(static: _Table, role: str) -> tuple[str, ...]:
    """Axes of the batch that split the table's width under a role."""
    if static.bound is None:
        return ()
    shape = (static.rows, static.width)
    entry = resolve(static.bound, role, static.dims, shape, name=f"table {static.dims}")[1]
    axes = (entry,) if isinstance(entry, str) else entry or ()
    held = batch_axes(static.bound)
    return tuple(axes) if all(axis in held for axis in axes) else ()


def _even(static: _Table, ids: Array) -> bool:
    """Whether the devices along the batch divide it, more than one of them."""
    axes = _batch(static.bound)
    return bool(axes) and ids.shape[0] % static.bound.size(axes) == 0  # type: ignore[union-attr]


def _moves(static: _Table, ids: Array) -> bool:
    """Whether a device's tokens are fewer than the rows of the table it would gather."""
    if not _even(static, ids):
        return False
    return math.prod(ids.shape) < static.rows * static.bound.size(_batch(static.bound))  # type: ignore[union-attr]


def _mapped(static: _Table, local: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """`local` on every device along the batch; other axes stay with the compiler."""
    return jax.shard_map(
        local,
        mesh=static.bound.mesh,  # type: ignore[union-attr]
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(_batch(static.bound)),
        # Derivatives are written by hand.
        check_vma=False,
    )
