"""What both norms are made of: rows lie along the last dim, columns across all others."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from colossax.errors import InputError


def row_mean(x: Float[Array, "*lead d"]) -> Float[Array, "*lead 1"]:
    """Mean of each row."""
    return jnp.mean(x, axis=-1, keepdims=True)


def along_rows(v: Float[Array, " d"], x: Float[Array, "*lead d"]) -> Float[Array, "*ones d"]:
    """A vector in float32 with as many dims as x, to stand beside each of its rows."""
    return jnp.expand_dims(v.astype(jnp.float32), tuple(range(x.ndim - 1)))


def column_sum(x: Float[Array, "*lead d"], like: Array) -> Float[Array, " d"]:
    """Sum over all rows, in the dtype of `like`."""
    return jnp.sum(x, axis=tuple(range(x.ndim - 1))).astype(like.dtype)


def check_vector(norm: str, name: str, v: Array, x: Array) -> None:
    """Refuse what does not stand beside a row.

    Raises:
        InputError: It has another shape than the last dim of x.
    """
    if x.ndim == 0 or v.shape != x.shape[-1:]:
        raise InputError(
            f"{norm}: {name} has shape {v.shape} beside x of {x.shape}; give one item per item of"
            f" x's last dim"
        )
