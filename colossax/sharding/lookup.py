"""Rows of a parameter table, by numbers that are spread over devices with the batch."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from colossax.config import BoundPlan, MeshAxis
from colossax.pallas.varying import zeros_after
from colossax.sharding.context import current
from colossax.sharding.matmul.splits import Axes, Split, axes_of, spec_of, split_of, turn_local
from colossax.sharding.ops import (
    compute_dtype,
    constrained,
    gathered,
    reduction_dtype,
    summed_gradient,
)
from colossax.sharding.rules import activation_axes, resolve
from colossax.typing import Dims


def lookup(
    table: Float[Array, "rows d"], ids: Int[Array, "b s"], dims: Dims
) -> Float[Array, "b s d"]:
    """Rows of a parameter table, in the compute dtype.

    Where a device's tokens are fewer than the rows and d is split along axes of the tokens, rows
    move and the table stays: each device looks up its part of d for the tokens of all devices
    along those axes, and one all-to-all hands the parts over. Where the rows are split, each
    device looks up those it has, for the tokens of all devices along the axes, and the parts are
    summed up, reduce-scattered if the axes split tokens. Backward goes the same ways and needs no
    reduction along these axes. Stages that split the width look up their parts and gather them;
    backward each takes its own. Else the table is gathered, and its gradient, summed up in float32,
    reduce-scattered. Left to itself the compiler replicates one or the other.

    Args:
        table: Parameter at rest.
        ids: Row numbers; those beyond the table read its last row.
        dims: Logical dims of the table.

    Cost: with t tokens and d items per device, over g devices: `(g-1)/g t d` forward and as much
    backward where d is split, `(g-1) t d` where rows are split along tokens' axes, `2 (g-1)/g t d`
    forward and nothing backward where along others; or for each axis `(g-1)/g rows d`, if less.
    """
    bound, dtype = current(), compute_dtype(table.dtype)
    place = _placed(bound, table.shape, ids.shape, tuple(dims), dtype)
    if place is None:
        return _by_compiler(_Table(bound=bound, dims=tuple(dims), dtype=dtype), table, ids)
    return _lookup(place, table, ids)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Place:
    """Splits of the table `[rows, d]`, of its gradient, and of the result `[b, s, d]`."""

    bound: BoundPlan
    rows: int
    tokens: int
    rest: Split
    grad: Split
    out: Split
    dtype: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Exchange:
    """What moves for a table that is split as `held` while it is looked up.

    Attributes:
        held: The table's split.
        token_axes: Axes of its rows and of its width along which a device sees all tokens, each
            with the dim of the tokens that it splits; widths first.
        widths: How many of them are of the width.
        summed: Axes of its rows that split no tokens.
        beside: Those of its width: each device looks up its part, and the parts are gathered.
    """

    held: Split
    token_axes: tuple[tuple[Axes, int], ...]
    widths: int
    summed: Axes
    beside: Axes


def _placed(
    bound: BoundPlan | None, shape: tuple[int, ...], ids: tuple[int, ...], dims: Dims, dtype: Any
) -> _Place | None:
    """Splits by the plan's rules; None where no tokens are split, or not evenly."""
    if bound is None or bound.single:
        return None
    sizes = [bound.size(activation_axes(bound, dim)) for dim in ("batch", "seq:residual")]
    if math.prod(sizes) == 1 or any(n % size for n, size in zip(ids, sizes, strict=True)):
        return None
    name = f"table {dims}"
    lead = ("batch", "seq:residual", dims[1])
    return _Place(
        bound=bound,
        rows=shape[0],
        tokens=math.prod(ids) // math.prod(sizes),
        rest=split_of(resolve(bound, "params", dims, shape, name=name)),
        grad=split_of(resolve(bound, "gradients", dims, shape, name=name)),
        out=split_of(resolve(bound, "activations", lead, (*ids, shape[1]), name=name)),
        dtype=dtype,
    )


def _exchange(place: _Place, split: Split) -> _Exchange:
    """What moves for a table of this split, by which is less: its rows, or their numbers."""
    of_rows, of_width = split
    width = place.out[2]
    inside = [axis for axis in of_rows if axis in axes_of(place.out[:2])]
    # A sum over axes that split no tokens is an all-reduce, else a reduce-scatter of all tokens.
    times = 2 if len(of_rows) > len(inside) else place.bound.size(of_rows)
    if times * place.tokens >= place.rows:
        of_rows, inside = (), []
    # Stages come first where they split the width, and then nothing else has a part of the result.
    beside = tuple(axis for axis in of_width[:1] if axis == MeshAxis.STAGE)
    of_width = of_width[len(beside) :]
    more = of_width[len(width) :] if of_width[: len(width)] == width else ()
    if place.tokens >= place.rows or any(axis not in axes_of(place.out[:2]) for axis in more):
        more = ()
    widths, rows = _by_dim(place, more), _by_dim(place, inside)
    return _Exchange(
        held=(of_rows, (*beside, *width, *more)),
        token_axes=(*widths, *rows),
        widths=len(widths),
        summed=tuple(axis for axis in of_rows if axis not in inside),
        beside=beside,
    )


def _by_dim(place: _Place, axes: Any) -> tuple[tuple[Axes, int], ...]:
    """Axes that split the same dim of the tokens together."""
    groups = ((tuple(a for a in axes if a in place.out[dim]), dim) for dim in (0, 1))
    return tuple((group, dim) for group, dim in groups if group)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _lookup(place: _Place, table: Array, ids: Array) -> Array:
    plan = _exchange(place, place.rest)

    def rows_local(table: Array, ids: Array) -> Array:
        table = turn_local(table.astype(place.dtype), place.rest, plan.held)
        shard_ids = _shard_ids_local(plan, place, ids, table.shape[0])
        part = table.at[shard_ids].get(mode="fill", fill_value=0)
        for at, (axes, dim) in reversed(list(enumerate(plan.token_axes))):
            if at < plan.widths:
                part = jax.lax.all_to_all(part, axes, split_axis=dim, concat_axis=2, tiled=True)
            else:
                part = jax.lax.psum_scatter(part, axes, scatter_dimension=dim, tiled=True)
        part = jax.lax.psum(part, plan.summed) if plan.summed else part
        if plan.beside:
            part = jax.lax.all_gather(part, plan.beside, axis=2, tiled=True)
        return part

    return _mapped(place, rows_local, (place.rest, place.out[:2]), place.out)(table, ids)


def _lookup_fwd(place: _Place, table: Array, ids: Array):
    return _lookup(place, table, ids), (ids, jnp.zeros((0,), table.dtype))


def _lookup_bwd(place: _Place, residuals: Any, dx: Array):
    ids, like = residuals
    plan = _exchange(place, place.grad)
    summed = reduction_dtype(place.bound, place.dtype)
    rows = place.rows // place.bound.size(plan.held[0])
    seen = [axis for axes, _ in plan.token_axes for axis in axes]
    partial = tuple(axis for axis in axes_of(place.out[:2]) if axis not in seen)

    def sums_local(ids: Array, dx: Array) -> Array:
        if plan.beside:
            size = dx.shape[2] // place.bound.size(plan.beside)
            start = jax.lax.axis_index(plan.beside) * size
            dx = jax.lax.dynamic_slice_in_dim(dx, start, size, axis=2)
        for at, (axes, dim) in enumerate(plan.token_axes):
            if at < plan.widths:
                dx = jax.lax.all_to_all(dx, axes, split_axis=2, concat_axis=dim, tiled=True)
            else:
                dx = jax.lax.all_gather(dx, axes, axis=dim, tiled=True)
        total = _added(rows, _shard_ids_local(plan, place, ids, rows), dx, mode="drop")
        return turn_local(total.astype(summed), plan.held, place.grad, partial=partial)

    total = _mapped(place, sums_local, (place.out[:2], place.out), place.grad)(ids, dx)
    return total.astype(like.dtype), None


_lookup.defvjp(_lookup_fwd, _lookup_bwd)


def _shard_ids_local(plan: _Exchange, place: _Place, ids: Array, rows: int) -> Array:
    """Numbers of all tokens among the rows that are here; those of others as one too large."""
    ids = jnp.clip(ids, 0, place.rows - 1)
    for axes, dim in plan.token_axes:
        ids = jax.lax.all_gather(ids, axes, axis=dim, tiled=True)
    if not plan.held[0]:
        return ids
    ids = ids - jax.lax.axis_index(plan.held[0]) * rows
    return jnp.where((ids >= 0) & (ids < rows), ids, rows)


def _mapped(place: _Place, local: Any, splits: tuple[Split, ...], out: Split) -> Any:
    return jax.shard_map(
        local,
        mesh=place.bound.mesh,
        in_specs=tuple(map(spec_of, splits)),
        out_specs=spec_of(out),
        # Derivatives are written by hand.
        check_vma=False,
    )


def _added(rows: int, ids: Array, dx: Array, *, mode: Any) -> Array:
    """Sums in float32 of what belongs to each row."""
    zeros = zeros_after(dx.ravel()[0], (rows, dx.shape[-1]))
    return zeros.at[ids].add(dx.astype(jnp.float32), mode=mode)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Table:
    bound: BoundPlan | None
    dims: Dims
    dtype: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_compiler(static: _Table, table: Array, ids: Array) -> Array:
    return gathered(static.bound, static.dims, static.dtype, table).at[ids].get(mode="clip")


def _by_compiler_fwd(static: _Table, table: Array, ids: Array):
    return _by_compiler(static, table, ids), (table, ids)


def _by_compiler_bwd(static: _Table, residuals: Any, dx: Array):
    table, ids = residuals
    total = _added(table.shape[0], ids, dx, mode="clip")
    if static.bound is not None and not static.bound.single:
        total = constrained(static.bound, "weights", static.dims, total)
    return summed_gradient(static.bound, static.dims, total, table), None


_by_compiler.defvjp(_by_compiler_fwd, _by_compiler_bwd)
