"""Two halves in zigzag order: a step of the ring as a pair of blocks that need no order.

Under a causal mask in zigzag order all steps but a rank's own have the same work on every rank: the
later half of the queries sees the early half of the keys, and one of (early, early) and (later,
later) is wholly visible. A pair of blocks is one block of twice the batch: first (later queries,
early keys), which is always visible, then (early, early) where the keys' rank comes before this
one, else (later, later). A rank's first half is early, its second is late.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool

from colossax.pallas.attention import Mask, merge_blocks


def past(mask: Mask) -> Mask:
    """The mask where all keys come before all queries."""
    window = None if mask.left is None else (mask.left, None)
    return mask.changed(causal=False, window=window)


def pair_queries(x: Array, early: Bool[Array, ""], rows: int, axis: int = 1) -> Array:
    """An array of a rank's queries, `[rows or 1, ...]` with tokens along `axis`."""
    first, second = _halves(x, rows, axis)
    return jnp.concatenate([second, jnp.where(early, first, second)])


def pair_keys(x: Array, early: Bool[Array, ""], rows: int) -> Array:
    """An array of a rank's keys, `[rows or 1, t, ...]`."""
    first, second = _halves(x, rows, 1)
    return jnp.concatenate([first, jnp.where(early, first, second)])


def _halves(x: Array, rows: int, axis: int) -> list[Array]:
    return jnp.split(jnp.broadcast_to(x, (rows, *x.shape[1:])), 2, axis)


def forward_of_pairs(out: Array, lse: Array, early: Bool[Array, ""]) -> tuple[Array, Array]:
    """A pair's two results as one over all queries of the rank."""
    (late_out, other_out), (late_lse, other_lse) = jnp.split(out, 2), jnp.split(lse, 2)
    for_early = jnp.where(early, other_lse, -jnp.inf)
    for_late = jnp.where(early, -jnp.inf, other_lse)
    late_out, late_lse = merge_blocks(late_out, late_lse, other_out, for_late)
    return (
        jnp.concatenate([other_out, late_out], axis=1),
        jnp.concatenate([for_early, late_lse], axis=2),
    )


def queries_of_pairs(dq: Array, early: Bool[Array, ""]) -> Array:
    """A pair's two gradients of queries as that of all queries of the rank."""
    late, other = jnp.split(dq, 2)
    return jnp.concatenate([jnp.where(early, other, 0), late + jnp.where(early, 0, other)], axis=1)


def keys_of_pairs(dk: Array, early: Bool[Array, ""]) -> Array:
    """A pair's two gradients of keys or values as that of all of a rank's."""
    first, other = jnp.split(dk, 2)
    return jnp.concatenate([first + jnp.where(early, other, 0), jnp.where(early, 0, other)], axis=1)
