"""Rounding to bfloat16 at random, with bits that no mesh, segment or slice can change."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, BFloat16, Float32, UInt32

_LOW_HALF = 0xFFFF
_MAGNITUDE = 0x7FFFFFFF
_GREATEST = 0x7F7FFFFF  # bits of the greatest finite float32; its upper half, of bfloat16's


def stochastic_round(
    x: Float32[Array, "*shape"], entropy: UInt32[Array, "*shape"]
) -> BFloat16[Array, "*shape"]:
    """One of the two bfloat16 around x, the nearer the likelier: its mean over `entropy` is x.

    Adds the lower 16 bits of `entropy` below the bits that are kept and cuts there. What bfloat16
    holds is kept, infinities and NaN among it; finite numbers beyond its greatest become that.

    Args:
        x: Any float32.
        entropy: Of which the lower 16 bits are uniform and know nothing of x's.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    # Bits of one sign are in the order of their numbers, and a carry into the exponent is right.
    up = (bits & _MAGNITUDE) + (entropy & _LOW_HALF)
    kept = (bits & ~jnp.uint32(_MAGNITUDE)) | jnp.minimum(up, _GREATEST)
    rounded = jax.lax.bitcast_convert_type((kept >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))


def update_entropy(
    old: BFloat16[Array, "*shape"], grad: Float32[Array, "*shape"], step: ArrayLike
) -> UInt32[Array, "*shape"]:
    """Random bits for each element of a moment, a hash of what makes its new value.

    A function of an element alone: the same whether a stack is updated whole, in segments, layer
    by layer or in shards. It takes the moment as stored, not the new value, whose last bit depends
    on how a program is compiled, and the upper half of the gradient, whose last bits depend on the
    order in which devices add it: one that differs there is nearly always rounded alike.

    Args:
        old: The moment before the update.
        grad: Its gradient.
        step: Number of the update, which makes the bits of steps independent.
    """
    upper = jax.lax.bitcast_convert_type(grad, jnp.uint32) >> 16
    word = (jax.lax.bitcast_convert_type(old, jnp.uint16).astype(jnp.uint32) << 16) | upper
    return _mixed(word ^ _mixed(jnp.asarray(step).astype(jnp.uint32)))


def _mixed(x: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """A bijection of 32 bits in which each bit of x changes half of the bits.

    Reference: C. Wellons 2018, Prospecting for Hash Functions: `lowbias32`.
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
