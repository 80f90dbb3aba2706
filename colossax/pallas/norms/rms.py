"""RMSNorm whose backward pass needs nothing but its inputs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from colossax.pallas.varying import vary_alike

from . import reference
from .rows import along_rows, check_vector, column_sum, row_mean


def rms_norm(
    x: Float[Array, "*lead d"], scale: Float[Array, " d"], *, eps: float
) -> Float[Array, "*lead d"]:
    """`x r scale` with `r = 1 / sqrt(mean(x^2) + eps)`, means over the last dim.

        dx     = r (dy scale - x r^2 mean(dy scale x))
        dscale = sum over rows of dy x r

    Computed in float32; results have the dtypes of what they belong to.

    Args:
        x: Rows of any number of leading dims.
        scale: Factor per column.
        eps: Added to the mean square.

    Raises:
        InputError: `scale` has another shape than x's last dim.

    Cost: forward moves 2 times the bytes of x, the least there is; backward 5 where the least is
    3: one pass for the two row means, one for dx and dscale. Backward keeps x and scale only: r
    costs it no pass of its own, and a forward pass that gave r away would read x once more, since
    the compiler's fused softmax-like kernel has one result. tests/aot/test_norms.py counts.
    Source: Zhang, Sennrich 2019, Root Mean Square Layer Normalization.
    """
    check_vector("rms_norm", "scale", scale, x)
    return _rms_norm(float(eps), *vary_alike((x, scale)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rms_norm(eps: float, x: Any, scale: Any) -> Any:
    return reference.rms_norm(x, scale, eps=eps)


def _rms_norm_fwd(eps: float, x: Any, scale: Any) -> Any:
    return reference.rms_norm(x, scale, eps=eps), (x, scale)


def _rms_norm_bwd(eps: float, saved: Any, dy: Any) -> Any:
    x, scale = saved
    wide, dy = x.astype(jnp.float32), dy.astype(jnp.float32)
    scaled = dy * along_rows(scale, x)
    square, product = row_mean(jnp.square(wide)), row_mean(scaled * wide)
    inverse = jax.lax.rsqrt(square + eps)
    dx = (scaled - wide * (product * jnp.square(inverse))) * inverse
    return dx.astype(x.dtype), column_sum(dy * wide * inverse, scale)


_rms_norm.defvjp(_rms_norm_fwd, _rms_norm_bwd)
