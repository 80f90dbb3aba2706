"""Rounding to bfloat16 at random, with bits that no mesh, segment or slice can change."""

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, BFloat16, Float32, UInt32

from colossax.pallas.dropout import mixed as _mixed
from colossax.typing import ParamInfo

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


def rounding_key(step: ArrayLike, key_data: UInt32[Array, "words"]) -> UInt32[Array, ""]:
    """What the bits that round all parameters of one update are made of.

    Args:
        step: Its number.
        key_data: Of the run's random key.
    """
    word = jnp.asarray(step).astype(jnp.uint32)
    for at in range(key_data.shape[0]):
        word = _mixed(word) ^ key_data[at]
    return _mixed(word)


def applied(
    infos: Any,
    params: Any,
    steps: Any,
    key: UInt32[Array, ""] | None,
    *,
    row: ArrayLike = 0,
    stride: int = 1,
) -> Any:
    """Parameters with their steps added, in their dtype; bfloat16 rounded at random by a key.

    The random bits of an element are a hash of key, path, layer and the element's index in its
    layer: no mesh, segment or order of layers changes them, and they need no memory and no message.

    Args:
        infos: Of the parameters, with their structure, or as of one layer of each.
        params: As they stand.
        steps: What the optimizer adds to them.
        key: See `rounding_key`; None: to the nearest, as Optax does.
        row: Number of the layer from `first_layer` on, where parameters are of one layer.
        stride: Layers from one to the next, where they have a dim of layers.
    """
    if key is None:
        return optax.apply_updates(params, steps)

    def one(info: ParamInfo, p: Array, step: Array) -> Array:
        if p.dtype != jnp.bfloat16:
            return (p + step).astype(p.dtype)
        entropy = element_entropy(info, p.shape, key, row=row, stride=stride)
        return stochastic_round(p.astype(jnp.float32) + step.astype(jnp.float32), entropy)

    return jax.tree.map(one, infos, params, steps)


def element_entropy(
    info: ParamInfo,
    shape: tuple[int, ...],
    key: UInt32[Array, ""],
    *,
    row: ArrayLike = 0,
    stride: int = 1,
) -> UInt32[Array, "*shape"]:
    """Random bits for each element of a parameter; see `applied`.

    The index counts modulo 2^32.
    """

    def along(dim: int) -> UInt32[Array, "*shape"]:
        return jax.lax.broadcasted_iota(jnp.uint32, shape, dim)

    layer = jnp.asarray(row).astype(jnp.uint32) + jnp.uint32(info.first_layer or 0)
    if info.stacked:
        layer = layer + along(0) * jnp.uint32(stride)
    index, size = jnp.zeros(shape, jnp.uint32), 1
    for dim in reversed(range(info.stacked, len(shape))):
        index = index + along(dim) * jnp.uint32(size % 2**32)
        size *= shape[dim]
    path = jnp.uint32(zlib.crc32(info.path.encode()))
    return _mixed(index ^ _mixed(layer ^ _mixed(key ^ path)))
