"""Updates of one row of an array, which stay in place under `vmap`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array


def in_place(update: Callable[[Array, Array, Array, int], Array]) -> Callable[..., Array]:
    """An update of one row of a dim, which stays one under `vmap`.

    Else it becomes a scatter there, which asks whether it is out of bounds, and for that the row is
    copied.

    Args:
        update: `(whole, value, number of the row, dim) -> whole`; value without the dim, number in
            bounds and the same for all that is mapped.
    """

    def at_dim(whole: Array, value: Array, at: Array, dim: int = 0) -> Array:
        @jax.custom_batching.custom_vmap
        def one(whole: Array, value: Array, at: Array) -> Array:
            return update(whole, value, at, dim)

        @one.def_vmap
        def mapped(size: int, batched: Any, whole: Array, value: Array, at: Array) -> Any:
            assert not batched[2]
            pairs = zip((whole, value), batched, strict=False)
            whole, value = (x if b else jnp.broadcast_to(x, (size, *x.shape)) for x, b in pairs)
            return at_dim(whole, value, at, dim + 1), True

        return one(whole, value, at)

    return at_dim


@in_place
def put_row(whole: Array, value: Array, at: Array, dim: int) -> Array:
    """`whole` with one row of a dim replaced."""
    return jax.lax.dynamic_update_index_in_dim(whole, value, at, dim)


@in_place
def raise_row(whole: Array, value: Array, at: Array, dim: int) -> Array:
    """`whole` with one row of a dim at least `value`, number by number."""
    new = jnp.maximum(jax.lax.dynamic_index_in_dim(whole, at, dim), jnp.expand_dims(value, dim))
    return jax.lax.dynamic_update_index_in_dim(whole, new, at, dim)


@in_place
def add_to_row(whole: Array, value: Array, at: Array, dim: int) -> Array:
    """`whole` with `value` added to one row of a dim."""
    new = jax.lax.dynamic_index_in_dim(whole, at, dim) + jnp.expand_dims(value, dim)
    return jax.lax.dynamic_update_index_in_dim(whole, new, at, dim)
