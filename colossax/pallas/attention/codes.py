"""A cache in codes of eight bits, with a scale for each token and kv head."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from .kept import HEAVY

SCALE = "_scale"
"""What the name of an array's scales ends with."""

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""The largest code, by dtype."""


def encoded(
    x: Float[Array, "*at h"], dtype: Any, scale_dtype: Any
) -> tuple[Array, Float[Array, "*at"]]:
    """Codes of vectors and the scale of each: `x` is about `codes * scale`.

    The scale is `max abs / largest code`, rounded to its type before anything is divided by it, so
    that what is decoded is off by the code's rounding alone. A vector of zeros has the scale 0.
    What is no number makes its scale none, and so all that is decoded by it.

    Args:
        x: Vectors along the last dim.
        dtype: Of the codes, one of `LARGEST`. int8 are rounded to nearest even.
        scale_dtype: Of the scales.
    """
    most = LARGEST[jnp.dtype(dtype).name]
    wide = x.astype(jnp.float32)
    scale = (jnp.max(jnp.abs(wide), axis=-1) * (1 / most)).astype(scale_dtype)
    # A CPU's maximum may pass over what is no number.
    scale = jnp.where(jnp.all(jnp.isfinite(wide), axis=-1), scale, jnp.nan)
    divisor = scale.astype(jnp.float32)[..., None]
    codes = jnp.clip(wide / jnp.where(divisor == 0, 1.0, divisor), -most, most)
    codes = jnp.round(codes) if jnp.issubdtype(dtype, jnp.integer) else codes
    return codes.astype(dtype), scale


def as_kept(new: dict[str, Array], cache: dict[str, Array]) -> dict[str, Array]:
    """What tokens bring, as their cache keeps it: by its names, in its types.

    Args:
        new: By name, without scales.
        cache: Arrays of the same names, and scales beside those that are codes.
    """
    kept = {}
    for name, x in new.items():
        if name + SCALE in cache:
            kept[name], kept[name + SCALE] = encoded(
                x, cache[name].dtype, cache[name + SCALE].dtype
            )
        else:
            kept[name] = x.astype(cache[name].dtype)
    return kept


def without_scales(held: dict[str, Any]) -> dict[str, Any]:
    """What `read` is given of it."""
    return {n: x for n, x in held.items() if not n.endswith(SCALE) and n not in HEAVY}


def read_kept(
    read: Callable[[dict[str, Array]], tuple[Array, Array]], held: dict[str, Array], dtype: Any
) -> tuple[Array, Array, Array | None, Array | None]:
    """Keys and values as they are multiplied, and the scales of their products; see `ReadSlots`.

    Codes are whole in any type that is computed in, and stay codes: the scale of a key multiplies
    its logits, that of a value its weights, so nothing is written in full.

    Args:
        read: Only picks and reshapes, so that scales go the way of their vectors.
        held: Of slots, by name.
        dtype: What codes are multiplied in.

    Returns:
        Keys `[slots, k, h]`, values `[slots, k, hv]`, and float32 scales `[slots, k]` of both;
        None where they are no codes.
    """
    codes = without_scales(held)
    keys, values = read(codes)
    if len(codes) == len(held):
        return keys, values, None, None
    scales = {name: held[name + SCALE].astype(jnp.float32)[..., None] for name in codes}
    of_keys, of_values = read(scales)
    return keys.astype(dtype), values.astype(dtype), of_keys[..., 0], of_values[..., 0]
