"""Norms as they are written down, differentiated by JAX: the truth."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .rows import along_rows, row_mean


def rms_norm(
    x: Float[Array, "*lead d"], scale: Float[Array, " d"], *, eps: float
) -> Float[Array, "*lead d"]:
    """`x / sqrt(mean(x^2) + eps) * scale`, see `rms.rms_norm`."""
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(row_mean(jnp.square(wide)) + eps)
    return (wide * inverse * along_rows(scale, x)).astype(x.dtype)


def layer_norm(
    x: Float[Array, "*lead d"], scale: Float[Array, " d"], bias: Float[Array, " d"], *, eps: float
) -> Float[Array, "*lead d"]:
    """`(x - mean) / sqrt(var + eps) * scale + bias`, see `layer.layer_norm`."""
    wide = x.astype(jnp.float32)
    centred = wide - row_mean(wide)
    inverse = jax.lax.rsqrt(row_mean(jnp.square(centred)) + eps)
    return (centred * inverse * along_rows(scale, x) + along_rows(bias, x)).astype(x.dtype)
