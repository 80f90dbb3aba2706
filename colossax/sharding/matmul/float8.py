"""Matmuls of weights in float8: inputs and weights in e4m3, gradients of results in e5m2.

Both formats keep so few bits that a tensor is multiplied by a scale first, `2^k`, so that its
largest number is about the largest of the format. A scale is of a whole tensor, whatever devices
hold of it, so every mesh rounds alike. A power of two rounds nothing itself: what is lost are the
bits of the format alone, and where results are divided by the scales, before they are summed over
devices or after, does not matter. It leaves less than a power of two of the range unused.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from colossax.config import BoundPlan
from colossax.sharding.context import shards_apart
from colossax.sharding.ops import (
    as_in_block,
    cast_at_rest,
    constrained,
    gathered,
    reduction_dtype,
    summed_gradient,
)
from colossax.typing import Dims

INPUT = jnp.dtype(jnp.float8_e4m3fn)
"""Of what is multiplied: three bits behind the first, up to 448."""

GRADIENT = jnp.dtype(jnp.float8_e5m2)
"""Of gradients of results: two bits behind the first, up to 57344."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Factors:
    """What is known of a matmul before it is traced.

    Attributes:
        bound: Plan in force.
        dims: Logical dims of the weight.
        contract: How many of them are of the input.
        recomputed: Whether it is recomputed in backward.
    """

    bound: BoundPlan | None
    dims: Dims
    contract: int
    recomputed: bool


FIRST = (16.0, 1.0, 2.0**-4)
"""What is taken for the largest of an empty history: of inputs, weights, gradients of results."""


def remembered(history: Array, noted: Array) -> Array:
    """The history `[3, steps]`, newest first, with what was noted in column 0 of the other."""
    return jnp.concatenate([noted[:, :1], history[:, :-1]], axis=1)


def amax(x: Array) -> Float[Array, ""]:
    """The largest magnitude of the whole tensor, float32; of devices that do not know of one
    another the largest too.

    Cost: one number per device that holds a part.
    """
    largest = jnp.max(jnp.abs(x), initial=0).astype(jnp.float32)
    for axis in shards_apart():
        largest = jax.lax.pmax(largest, axis)
    return largest


def scale_of(largest: Float[Array, ""], dtype: Any) -> Float[Array, ""]:
    """The greatest power of two by which `largest` stays within a format; 1 where it says nothing.

    Args:
        largest: Of 0, infinite or no number the scale is 1.
        dtype: The format.

    Returns:
        `2^k`, float32, k from -126 to 126, so that its reciprocal is exact too.
    """
    top_mantissa, top_exponent = jnp.frexp(jnp.float32(jnp.finfo(dtype).max))
    mantissa, exponent = jnp.frexp(largest)
    k = jnp.clip(top_exponent - exponent - (mantissa > top_mantissa), -126, 126)
    k = jnp.where(jnp.isfinite(largest) & (largest > 0), k, 0)
    return jax.lax.bitcast_convert_type((k.astype(jnp.int32) + 127) << 23, jnp.float32)


def quantised(x: Array, scale: Float[Array, ""], dtype: Any) -> Array:
    """`x * scale` to the nearest of the format, ties to even; beyond its largest, the largest.

    What is infinite or no number becomes NaN, so that a step that overflows is skipped.
    """
    top = jnp.finfo(dtype).max.astype(jnp.float32)
    wide = jnp.clip(x.astype(jnp.float32) * scale, -top, top)
    return jnp.where(jnp.isfinite(x), wide, jnp.nan).astype(dtype)


# One rule for gather and matmul together, as in `colossax.sharding.linear`, and for the casts: what
# goes from forward to backward, and along the axes of the batch, is a byte for each number.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def float8_matmul(
    static: Factors, x: Array, w: Array, bias: Array | None, history: Array | None = None
) -> Array:
    """`x @ w + bias`, products of float8 added up in float32.

    Scales are of the largest of what is multiplied, which so fits; or of the largest in a history,
    which nothing has to wait for, and what is larger than the format then becomes its largest.

    Args:
        static: The rest.
        x: `[*tokens, in]` in the compute dtype.
        w: `[*in, *out]` at rest; rounded to the compute dtype first, as on every way to a matmul.
        bias: `[*out]` at rest, or None; added in the compute dtype.
        history: `[3, steps]`, the largest of inputs, weights and gradients of results in the steps
            before, newest first, 0 where there is none; or None. What backward calls its gradient
            has those of this step in column 0; see `remembered`.

    Returns:
        `[*tokens, out]` in the compute dtype.

    Cost: a byte for each number of the weight and direction where it is gathered, and three
    numbers for the scales, each a maximum over the devices.
    """
    return _forward(static, x, w, bias, history)[0]


def _forward(
    static: Factors, x: Array, w: Array, bias: Array | None, history: Array | None
) -> tuple[Array, Any]:
    largest = amax(x), amax(w.astype(x.dtype))
    by_x = _scale(static, history, 0, largest[0], INPUT)
    by_w = _scale(static, history, 1, largest[1], INPUT)
    narrow = quantised(x, by_x, INPUT)
    matrix = _matrix(static, w, by_w, x.dtype)
    y = _unscaled(_dot(narrow, matrix, 0, x.dtype), by_x, by_w)
    if bias is not None:
        y += gathered(static.bound, static.dims[static.contract :], x.dtype, bias).ravel()
    kept = matrix if static.recomputed else None
    return y, (narrow, by_x, kept, w, by_w, bias, history, largest)


def _backward(static: Factors, residuals: Any, dy: Array) -> tuple[Array | None, ...]:
    x, by_x, matrix, w, by_w, bias, history, largest = residuals
    bound, dims, out = static.bound, static.dims, static.dims[static.contract :]
    summed = reduction_dtype(bound, dy.dtype)
    dy = as_in_block(bound, out, dy)
    largest = (*largest, amax(dy))
    by_dy = _scale(static, history, 2, largest[2], GRADIENT)
    narrow = quantised(dy, by_dy, GRADIENT)
    if matrix is None:
        matrix = _matrix(static, w, by_w, dy.dtype)
    dx = _unscaled(_dot(narrow, matrix, 1, dy.dtype), by_dy, by_w)
    tokens = tuple(range(x.ndim - 1))
    dw = _in_float32(x, narrow, ((tokens, tokens), ((), ())), summed)
    dw = summed_gradient(bound, dims, _unscaled(dw, by_x, by_dy).reshape(w.shape), w)
    noted = None
    if history is not None:
        noted = jnp.zeros_like(history).at[:, 0].set(jnp.stack(largest))
    if bias is None:
        return dx, dw, None, noted
    db = jnp.sum(dy, axis=tokens, dtype=jnp.float32).astype(summed).reshape(bias.shape)
    return dx, dw, summed_gradient(bound, out, db, bias), noted


float8_matmul.defvjp(_forward, _backward)


def _scale(
    static: Factors, history: Array | None, row: int, now: Array, dtype: Any
) -> Float[Array, ""]:
    """Of a tensor whose largest is this now, or was as a row of the history says."""
    if history is None:
        return scale_of(now, dtype)
    assert static.bound is not None
    seen = jnp.max(history[row])
    scale = scale_of(jnp.where(seen > 0, seen, FIRST[row]), dtype)
    return scale * 2.0**-static.bound.plan.precision.float8.margin


def _matrix(static: Factors, w: Array, scale: Array, compute: Any) -> Array:
    """The weight in float8 as `[in, out]`, gathered along the axes that split the batch."""

    def cast(w: Array) -> Array:
        return quantised(w.astype(compute), scale, INPUT)

    bound, inner = static.bound, w.shape[: static.contract]
    if bound is None or bound.single:
        whole = cast(w)
    else:
        shard = cast_at_rest(bound, static.dims, cast, w)
        whole = constrained(bound, "weights", static.dims, shard)
    return whole.reshape(math.prod(inner), -1)


def _dot(x: Array, matrix: Array, dim: int, dtype: Any) -> Array:
    """The last dim of `x` times this one of the matrix."""
    return _in_float32(x, matrix, (((x.ndim - 1,), (dim,)), ((), ())), dtype)


def _in_float32(x: Array, y: Array, dims: Any, dtype: Any) -> Array:
    """Products, exact, added up in float32 and rounded to `dtype` once, by CPUs and GPUs alike."""
    # By default cuBLAS adds up in fewer bits than float32 has.
    exact = jax.lax.Precision.HIGHEST
    return jax.lax.dot_general(x, y, dims, precision=exact, preferred_element_type=dtype)


def _unscaled(y: Array, *scales: Array) -> Array:
    """`y` divided by scales, exactly."""
    for scale in scales:
        y = y * (1 / scale).astype(y.dtype)
    return y
