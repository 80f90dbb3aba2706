"""Attention to a cache under a plan: a region manual over the whole mesh, split over heads."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from colossax.config import BoundPlan
from colossax.pallas import attention as local
from colossax.sharding.attention_layout import select_kv_heads_local
from colossax.sharding.context import current
from colossax.sharding.rules import check_heads, resolve

CACHE_DIMS = ("layers", None, None, "kv_heads", "head_dim")
"""Of keys and values of a contiguous cache: `[layers, seats, slots, k, h]`."""


def attend_cache(
    q: Float[Array, "t n h"],
    k: Float[Array, "t k h"],
    v: Float[Array, "t k hv"],
    cache: dict[str, Array],
    layer: int | Int[Array, ""],
    *,
    seat: Int[Array, " t"],
    position: Int[Array, " t"],
    slot: Int[Array, " t"],
    window: tuple[int | None, int | None] | None = None,
    alibi_slopes: Float[Array, " n"] | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> tuple[Float[Array, "t n hv"], dict[str, Array]]:
    """Write flat tokens into the cache and attend within each one's seat, heads split by the plan.

    Arguments and results are those of `colossax.pallas.attention.attend_cache`. The cache lies as
    the rules of its role say; every device writes and reads the kv heads it holds, for the query
    heads of those. Where all devices hold all of them, each reads those of its query heads.

    Cost: no communication where q, k and v come as the rules lay out heads; tokens are replicated
    on every device.

    Raises:
        PlanError: Heads are not a multiple of their axes.
    """
    bound = current()
    run = functools.partial(local.attend_cache, window=window, scale=scale, soft_cap=soft_cap)
    where = {"seat": seat, "position": position, "slot": slot}
    specs = None if bound is None or bound.single else _specs(bound, cache)
    if bound is None or specs is None:
        return run(q, k, v, cache, layer, **where, alibi_slopes=alibi_slopes)
    n, kv_heads = q.shape[1], specs["k"][3]
    heads = _query_axes(bound, q) if kv_heads is None else kv_heads
    of_q, of_kv = (PartitionSpec(None, axes, None) for axes in (heads, kv_heads))
    replicated = PartitionSpec()

    def island_local(
        q: Any, k: Any, v: Any, cache: Any, layer: Any, where: Any, slopes: Any
    ) -> Any:
        read = None
        if heads is not None and kv_heads is None:
            read = select_kv_heads_local(bound, heads, n, k.shape[1])
        return run(q, k, v, cache, layer, **where, alibi_slopes=slopes, of_kv_heads=read)

    mapped = jax.shard_map(
        island_local,
        mesh=bound.mesh,
        in_specs=(of_q, of_kv, of_kv, specs, replicated, replicated, PartitionSpec(heads)),
        out_specs=(of_q, specs),
        check_vma=False,
    )
    return mapped(q, k, v, cache, jnp.asarray(layer), where, alibi_slopes)


def cache_spec(bound: BoundPlan, shape: tuple[int, ...], dims: tuple[Any, ...]) -> PartitionSpec:
    """How an array of a cache lies on the mesh.

    Raises:
        PlanError: A dim is not a multiple of its axes.
    """
    return resolve(bound, "cache", dims, shape, name="key-value cache")


def _specs(bound: BoundPlan, cache: dict[str, Array]) -> dict[str, PartitionSpec] | None:
    """By name; None where rules split more than kv heads, or those of k and v differently."""
    specs = {name: cache_spec(bound, x.shape, CACHE_DIMS) for name, x in cache.items()}
    split = {spec[3] for spec in specs.values()}
    others = any(spec[dim] for spec in specs.values() for dim in (0, 1, 2, 4))
    return None if others or len(split) > 1 else specs


def _query_axes(bound: BoundPlan, q: Array) -> Any:
    """Axes of the query heads where every device holds all kv heads."""
    check_heads(bound, q.shape[1], name="attention q")
    return resolve(bound, "activations", (None, "heads", None), q.shape, name="attention q")[1]
