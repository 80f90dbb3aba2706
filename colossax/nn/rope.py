"""Rotary position embedding, with Llama 3's frequency scaling."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from colossax.nn.config import RopeConfig


def frequencies(config: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians per position, `[head_dim / 2]`, float32."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
    freqs = (1.0 / (config.theta**exponents)).astype(np.float32) / config.linear_factor
    scaling = config.llama3
    if scaling is None:
        return freqs.astype(np.float32)
    wavelength = 2 * math.pi / freqs
    turns = scaling.original_max_positions / wavelength
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
    return (freqs * keep + freqs / scaling.factor * (1 - keep)).astype(np.float32)


def rope_tables(
    positions: Int[Array, "b s"], config: RopeConfig, head_dim: int
) -> tuple[Float[Array, "b s 1 h2"], Float[Array, "b s 1 h2"]]:
    """Cosines and sines of every position, float32, broadcastable over heads."""
    angles = positions[..., None, None].astype(jnp.float32) * frequencies(config, head_dim)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "b s n h"], tables: tuple[Float[Array, "b s 1 h2"], Float[Array, "b s 1 h2"]]
) -> Float[Array, "b s n h"]:
    """Rotate pairs (i, i + h/2) by their angle, in float32.

    Source: Su et al. 2021, RoFormer; the pairing is the one Hugging Face checkpoints use.
    """
    cos, sin = tables
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    ).astype(x.dtype)
