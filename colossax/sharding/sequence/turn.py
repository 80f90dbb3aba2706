"""Shards in natural order brought into the balanced one, and back."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .axes import RingAxes


def balanced_from_contiguous_local(x: Array, *, axes: RingAxes, dim: int = 1) -> Array:
    """A rank's tokens `[r S / R, (r + 1) S / R)` exchanged for chunks r and 2R - 1 - r of 2R.

    Args:
        x: Any array of a rank's tokens.
        axes: The ring.
        dim: Which dim of `x` counts tokens; an even number of them.

    Cost: two permutes, each of half of `x`; a chunk that stays at home is not sent.
    """
    even, odd = jnp.split(x, 2, axis=dim)  # chunks 2r and 2r + 1
    even = jax.lax.ppermute(even, axes.circle.names, _pairs(axes.size, 0))
    odd = jax.lax.ppermute(odd, axes.circle.names, _pairs(axes.size, 1))
    return _by_parity(even, odd, axes, dim)


def contiguous_from_balanced_local(x: Array, *, axes: RingAxes, dim: int = 1) -> Array:
    """The way back from `balanced_from_contiguous_local`."""
    early, late = jnp.split(x, 2, axis=dim)
    even, odd = jnp.split(_by_parity(early, late, axes, dim), 2, axis=dim)
    back = [[(to, source) for source, to in _pairs(axes.size, which)] for which in (0, 1)]
    even = jax.lax.ppermute(even, axes.circle.names, back[0])
    odd = jax.lax.ppermute(odd, axes.circle.names, back[1])
    return jnp.concatenate([even, odd], axis=dim)


def _pairs(ranks: int, which: int) -> list[tuple[int, int]]:
    """(rank that has chunk 2r + which at first, rank that wants it)."""
    chunks = ((rank, 2 * rank + which) for rank in range(ranks))
    return [(rank, min(chunk, 2 * ranks - 1 - chunk)) for rank, chunk in chunks]


def _by_parity(one: Array, two: Array, axes: RingAxes, dim: int) -> Array:
    """Both in this order on even ranks, swapped on odd ones: chunk r is even where r is."""
    swapped = axes.source_local() % 2 == 1
    first, second = jnp.where(swapped, two, one), jnp.where(swapped, one, two)
    return jnp.concatenate([first, second], axis=dim)
