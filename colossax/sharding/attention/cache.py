"""Attention to a cache under a plan: a region manual over the whole mesh, split over heads."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from colossax.config import BoundPlan
from colossax.pallas import attention as local
from colossax.pallas.attention.codes import SCALE, without_scales
from colossax.pallas.attention.kept import HEAVY
from colossax.sharding.attention.layout import select_kv_heads_local
from colossax.sharding.context import current
from colossax.sharding.rules import check_heads, resolve
from colossax.typing import Dims

CACHE_DIMS = ("layers", None, None, "kv_heads", "head_dim")
"""Of keys and values of a contiguous cache: `[layers, seats, slots, k, h]`."""

PAGES = "pages"
"""Dim of a cache's rows that are pages, which a plan may share among devices of a ring."""


def attend_cache(
    q: Float[Array, "t n h"],
    new: dict[str, Array] | None,
    cache: dict[str, Array],
    layer: int | Int[Array, ""],
    *,
    dims: Mapping[str, Dims] | None = None,
    seat: Int[Array, " t"],
    position: Int[Array, " t"],
    slot: Int[Array, " t"],
    window: tuple[int | None, int | None] | None = None,
    chunk: int | None = None,
    alibi_slopes: Float[Array, " n"] | None = None,
    sinks: Float[Array, " n"] | None = None,
    biases: Sequence[local.RelativeBias] = (),
    scale: float | None = None,
    soft_cap: float | None = None,
    read: local.ReadSlots = local.keys_and_values,
    pages: local.Pages | None = None,
    sink_q: Float[Array, "t n h"] | None = None,
) -> tuple[Float[Array, "t n hv"], dict[str, Array]]:
    """Write flat tokens into the cache and attend within each one's seat, heads split by the plan.

    Arguments and results are those of `colossax.pallas.attention.attend_cache`, but for `dims`: the
    logical dims of the cache's arrays by name, default `CACHE_DIMS` of all; scales of codes have
    those of their array but for the last. The cache lies as the rules of its role say; every device
    writes and reads the kv heads it holds, for the query heads of those. Where all devices hold all
    of them, or what is kept has no such dim, each reads those of its query heads. `read` gets what
    a device holds; arrays that it closes over come whole.

    Cost: no communication where q and what is kept come as the rules lay out heads; tokens are
    replicated on every device.

    Raises:
        PlanError: Heads are not a multiple of their axes.
    """
    bound = current()
    run = functools.partial(
        local.attend_cache, window=window, chunk=chunk, scale=scale, soft_cap=soft_cap
    )
    given = {"alibi_slopes": alibi_slopes, "sinks": sinks, "biases": tuple(biases) or None}
    of_heads: dict[str, Any] = {name: x for name, x in given.items() if x is not None}
    where = {"seat": seat, "position": position, "slot": slot, "pages": pages}
    dims = dict.fromkeys(without_scales(cache), CACHE_DIMS) if dims is None else dims
    if pages is not None:
        dims = {name: in_pages(one) for name, one in dims.items()}
    dims = {**dims, **{n + SCALE: d[:-1] for n, d in dims.items() if n + SCALE in cache}}
    dims |= {n: dims["k"][:-1] for n in HEAVY if n in cache}
    specs = None if bound is None or bound.single else cache_specs(bound, cache, dims)
    if bound is None or specs is None:
        return run(q, new, cache, layer, **where, **of_heads, read=read, sink_q=sink_q)
    kv_heads = next(iter(axes_of("kv_heads", specs, dims)), None)
    if pages is not None:
        where["pages"] = dataclasses.replace(pages, ring=_ring(specs, dims))
    heads = heads_axes(bound, q.shape[1]) if kv_heads is None else kv_heads
    of_q, replicated = PartitionSpec(None, heads, None), PartitionSpec()
    of_new = {name: PartitionSpec(None, *specs[name][3:]) for name in new or ()}
    n, select = q.shape[1], heads is not None and kv_heads is None

    def island_local(qs: Any, new: Any, cache: Any, layer: Any, where: Any, of_heads: Any) -> Any:
        here = _of_query_heads_local(bound, heads, n, read) if select else read
        q, sink_q = qs
        return run(q, new, cache, layer, **where, **of_heads, read=here, sink_q=sink_q)

    mapped = jax.shard_map(
        island_local,
        mesh=bound.mesh,
        in_specs=(of_q, of_new or None, specs, replicated, replicated, PartitionSpec(heads)),
        out_specs=(of_q, specs),
        check_vma=False,
    )
    return mapped((q, sink_q), new, cache, jnp.asarray(layer), where, of_heads)


def cache_spec(bound: BoundPlan, shape: tuple[int, ...], dims: tuple[Any, ...]) -> PartitionSpec:
    """How an array of a cache lies on the mesh.

    Raises:
        PlanError: A dim is not a multiple of its axes.
    """
    return resolve(bound, "cache", dims, shape, name="key-value cache")


def cache_specs(
    bound: BoundPlan, cache: dict[str, Array], dims: Mapping[str, Dims]
) -> dict[str, PartitionSpec] | None:
    """By name; None where rules split more than kv heads, or those of two arrays differently."""
    specs = {name: cache_spec(bound, x.shape, dims[name]) for name, x in cache.items()}
    others = any(
        axes is not None and dim not in ("kv_heads", PAGES)
        for name, spec in specs.items()
        for dim, axes in zip(dims[name], spec, strict=True)
    )
    return None if others or len(axes_of("kv_heads", specs, dims)) > 1 else specs


def in_pages(dims: Dims) -> Dims:
    """Dims of an array of the cache whose rows are pages."""
    return (dims[0], PAGES, *dims[2:])


def _ring(specs: dict[str, PartitionSpec], dims: Mapping[str, Dims]) -> tuple[str, ...]:
    """Axes that share the pages."""
    (axes,) = axes_of(PAGES, specs, dims)
    return axes if isinstance(axes, tuple) else () if axes is None else (axes,)


def axes_of(wanted: str, specs: dict[str, PartitionSpec], dims: Mapping[str, Dims]) -> set[Any]:
    """How the arrays that have a dim split it."""
    return {
        axes
        for name, spec in specs.items()
        for dim, axes in zip(dims[name], spec, strict=True)
        if dim == wanted
    }


def _of_query_heads_local(
    bound: BoundPlan, axes: Any, heads: int, read: local.ReadSlots
) -> local.ReadSlots:
    """Of all kv heads, those that this device's query heads read."""

    def chosen(held: dict[str, Array]) -> tuple[Array, Array]:
        keys, values = read(held)
        select = select_kv_heads_local(bound, axes, heads, keys.shape[1])
        return select(keys), select(values)

    return chosen


def heads_axes(bound: BoundPlan, heads: int) -> Any:
    """Axes that split so many heads of queries, None where none do.

    Raises:
        PlanError: They are not a multiple of their axes.
    """
    check_heads(bound, heads, name="attention q")
    dims = None, "heads", None
    return resolve(bound, "activations", dims, (1, heads, 1), name="attention q")[1]
