"""Attention of guessed tokens to a few pages of a cache under a plan, split over kv heads."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from colossax.pallas import attention as local
from colossax.pallas.attention.codes import SCALE
from colossax.pallas.attention.pages import scores_of
from colossax.pallas.attention.retrieved import DRAFT, FOUND, MEAN
from colossax.sharding.attention.cache import CACHE_DIMS, axes_of, cache_specs, in_pages
from colossax.sharding.context import current
from colossax.typing import Dims

_PAGED = in_pages(CACHE_DIMS)

MEAN_DIMS: Dims = (*_PAGED[:2], *_PAGED[3:])
"""Of mean keys of pages: `[layers, pages, k, h]`."""

DIMS: dict[str, Dims] = {
    **dict.fromkeys(("k", "v"), _PAGED),
    **dict.fromkeys(("k" + SCALE, "v" + SCALE), _PAGED[:-1]),
    **dict.fromkeys((DRAFT + "k", DRAFT + "v"), CACHE_DIMS),
    MEAN: MEAN_DIMS,
    FOUND: ("layers", None, "kv_heads", None),
}
"""Logical dims of what `attend_retrieved` gets, by name."""


def attend_retrieved(
    q: Float[Array, "t n h"],
    new: dict[str, Array],
    cache: dict[str, Array],
    layer: int | Int[Array, ""],
    *,
    retrieved: local.Retrieved,
    alibi_slopes: Float[Array, " n"] | None = None,
    sinks: Float[Array, " n"] | None = None,
    window: tuple[int | None, int | None] | None = None,
    chunk: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> tuple[Float[Array, "t n hv"], dict[str, Array]]:
    """`colossax.pallas.attention.attend_retrieved`, each device of the kv heads that it holds.

    Args:
        q, new, cache, layer, retrieved: As there.
        alibi_slopes, sinks, window, chunk, scale, soft_cap: As of `attend_cache`.

    Cost: no communication where kv heads are split as the rules say. Where all devices hold all of
    them the compiler lays it out.
    """
    bound = current()

    def run(q: Any, new: Any, cache: Any, layer: Any, retrieved: Any, of_heads: Any) -> Any:
        kv_heads = cache["k"].shape[3]
        by_kv = {name: x.reshape(kv_heads, -1) for name, x in of_heads.items()}
        scores = scores_of(
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
            window=window,
            chunk=chunk,
            soft_cap=soft_cap,
            slopes=by_kv.get("slopes"),
            sinks=by_kv.get("sinks"),
            biases=(),
        )
        return local.attend_retrieved(q, new, cache, layer, retrieved=retrieved, scores=scores)

    given = {"slopes": alibi_slopes, "sinks": sinks}
    of_heads = {name: x.astype(jnp.float32) for name, x in given.items() if x is not None}
    specs = None if bound is None or bound.single else cache_specs(bound, cache, DIMS)
    axes = None if specs is None else next(iter(axes_of("kv_heads", specs, DIMS)), None)
    if bound is None or specs is None or axes is None:
        return run(q, new, cache, layer, retrieved, of_heads)
    of_q, replicated = PartitionSpec(None, axes, None), PartitionSpec()
    mapped = jax.shard_map(
        run,
        mesh=bound.mesh,
        in_specs=(of_q, of_q, specs, replicated, replicated, PartitionSpec(axes)),
        out_specs=(of_q, specs),
        check_vma=False,
    )
    return mapped(q, new, cache, jnp.asarray(layer), retrieved, of_heads)
