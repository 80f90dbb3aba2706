"""LayerNorm whose backward pass needs its inputs and the mean of each row."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from colossax.pallas.varying import vary_alike

from . import reference
from .rows import along_rows, check_vector, column_sum, row_mean


def layer_norm(
    x: Float[Array, "*lead d"], scale: Float[Array, " d"], bias: Float[Array, " d"], *, eps: float
) -> Float[Array, "*lead d"]:
    """`c r scale + bias` with `c = x - mean(x)` and `r = 1 / sqrt(mean(c^2) + eps)`.

        dx     = r (dy scale - mean(dy scale) - c r^2 mean(dy scale c))
        dscale = sum over rows of dy c r
        dbias  = sum over rows of dy

    Means are over the last dim. Computed in float32; results have the dtypes of what they belong
    to. The variance is that of the centred rows, so a large mean costs no precision.

    Args:
        x: Rows of any number of leading dims.
        scale: Factor per column.
        bias: Summand per column.
        eps: Added to the variance.

    Raises:
        InputError: `scale` or `bias` has another shape than x's last dim.

    Cost: forward moves 2 times the bytes of x, the least there is, and 3 where it also gives the
    mean away (2 where x comes from a sum, which then has the mean as a second result). Backward
    moves 5 where the least is 3: one pass for three row means, one for dx and both column sums;
    3 where neither scale nor bias has a gradient. It keeps x, scale and 4 bytes per row: with r
    kept too, backward moves no less and forward one more. JAX's own gradient moves 10 and keeps
    x in float32. tests/aot/test_norms.py counts.
    Source: Ba, Kiros, Hinton 2016, Layer Normalization.
    """
    check_vector("layer_norm", "scale", scale, x)
    check_vector("layer_norm", "bias", bias, x)
    return _layer_norm(float(eps), *vary_alike((x, scale, bias)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layer_norm(eps: float, x: Any, scale: Any, bias: Any) -> Any:
    return reference.layer_norm(x, scale, bias, eps=eps)


def _layer_norm_fwd(eps: float, x: Any, scale: Any, bias: Any) -> Any:
    learned = scale.perturbed or bias.perturbed
    x, scale, bias = x.value, scale.value, bias.value
    out = reference.layer_norm(x, scale, bias, eps=eps)
    like = jnp.zeros((0,), bias.dtype) if learned else None
    return out, (x, scale, row_mean(x.astype(jnp.float32)), like)


def _layer_norm_bwd(eps: float, saved: Any, dy: Any) -> Any:
    x, scale, mean, like = saved
    # Without column sums all of this is one kernel. With them the compiler would make that kernel
    # all the same, or one that writes `c r` in float32, and read everything again for the sums:
    # it shall neither find the variance that forward has, nor join the row means with what follows.
    apart = (lambda means: means) if like is None else jax.lax.optimization_barrier
    centred = x.astype(jnp.float32) - apart(mean)
    dy = dy.astype(jnp.float32)
    scaled = dy * along_rows(scale, x)
    variance, shift, product = apart(
        (row_mean(jnp.square(centred)), row_mean(scaled), row_mean(scaled * centred))
    )
    inverse = jax.lax.rsqrt(variance + eps)
    dx = (scaled - shift - centred * (product * jnp.square(inverse))) * inverse
    if like is None:
        return dx.astype(x.dtype), None, None
    return dx.astype(x.dtype), column_sum(dy * centred * inverse, scale), column_sum(dy, like)


_layer_norm.defvjp(_layer_norm_fwd, _layer_norm_bwd, symbolic_zeros=True)
