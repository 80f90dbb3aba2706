"""Which tiles of the scores a kernel visits, and which of them need no mask."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Visits:
    """For each tile along one side of the scores, tiles along the other; `[b, tiles]` each.

    The tiles visited are `[first, last)`; of those, `[inner_first, inner_last)` lie within every
    row's range, where no mask is needed. All four ascend, or are equal.
    """

    first: Int[Array, "b tiles"]
    inner_first: Int[Array, "b tiles"]
    inner_last: Int[Array, "b tiles"]
    last: Int[Array, "b tiles"]

    @classmethod
    def of(cls, first: Array, inner_first: Array, inner_last: Array, last: Array) -> "Visits":
        """In order, whatever the bounds: nothing visited is `first == last`."""
        last = jnp.maximum(first, last)
        inner_first = jnp.clip(inner_first, first, last)
        inner_last = jnp.clip(inner_last, inner_first, last)
        return cls(first=first, inner_first=inner_first, inner_last=inner_last, last=last)

    @property
    def packed(self) -> Int[Array, "b tiles 4"]:
        """As one array, in order."""
        return jnp.stack([self.first, self.inner_first, self.inner_last, self.last], axis=-1)


def visits_of_queries(
    lo: Int[Array, "b s"], hi: Int[Array, "b s"], q_tile: int, kv_tile: int
) -> Visits:
    """Key tiles that the queries of each tile see, from their ranges `[lo, hi)` of keys.

    Queries that see nothing widen no range. `s` is a multiple of `q_tile`.
    """
    lo, hi = (x.reshape(x.shape[0], -1, q_tile) for x in (lo, hi))
    empty = hi <= lo
    most = jnp.iinfo(jnp.int32).max
    first = jnp.min(jnp.where(empty, most, lo), axis=-1) // kv_tile
    last = -(-jnp.max(jnp.where(empty, 0, hi), axis=-1) // kv_tile)
    nothing = jnp.all(empty, axis=-1)
    return Visits.of(
        jnp.where(nothing, 0, first),
        -(-jnp.max(lo, axis=-1) // kv_tile),
        jnp.min(hi, axis=-1) // kv_tile,
        jnp.where(nothing, 0, last),
    )


def visits_of_keys(of_queries: Visits, kv_tiles: int) -> Visits:
    """Query tiles that see any key of each of `kv_tiles` key tiles, from `visits_of_queries`.

    Cost: b q_tiles kv_tiles comparisons.
    """
    tiles = jnp.arange(kv_tiles, dtype=jnp.int32)[:, None]
    query, count = jnp.arange(of_queries.first.shape[1]), of_queries.first.shape[1]

    def between(first: Array, last: Array) -> Array:
        return (first[:, None] <= tiles) & (tiles < last[:, None])

    visited = between(of_queries.first, of_queries.last)
    inner = between(of_queries.inner_first, of_queries.inner_last)
    inner_first = jnp.min(jnp.where(inner, query, count), axis=-1)
    behind = ~inner & (query >= inner_first[..., None])
    bounds = (
        jnp.min(jnp.where(visited, query, count), axis=-1),
        inner_first,
        jnp.min(jnp.where(behind, query, count), axis=-1),
        jnp.max(jnp.where(visited, query + 1, 0), axis=-1),
    )
    return Visits.of(*(x.astype(jnp.int32) for x in bounds))
