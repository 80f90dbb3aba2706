"""The matmul with N:M sparse weights by XLA: the matrix, made and multiplied."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

from colossax.pallas.target import Target

from .spec import FOUR, SparseSpec


def why_not(spec: SparseSpec, target: Target) -> str | None:
    """It takes everything everywhere."""
    return None


def multiply(
    x: Float[Array, "m k"], values: Float[Array, "a n q"], index: Int8[Array, "a n q"]
) -> Float[Array, "m n"]:
    """`sparse_matmul`; float32.

    Cost: 2 m k n FLOPs; the matrix in x's dtype is written and read.
    """
    w = expanded(values, index, x.dtype)
    return jnp.einsum("mk,nk->mn", x, w, preferred_element_type=jnp.float32)


def expanded(
    values: Float[Array, "a *outs q"], index: Int8[Array, "a *outs q"], dtype: jnp.dtype
) -> Float[Array, "*outs k"]:
    """The matrix that is kept, its inputs last, 0 where nothing was."""
    places = jnp.arange(FOUR, dtype=jnp.int8)
    fours = jnp.where(index[..., None] == places, values.astype(dtype)[..., None], 0)
    # Places of a four differ, so that sums have one number each.
    return jnp.sum(fours, axis=0, dtype=dtype).reshape(*index.shape[1:-1], -1)
