"""Rotary position embedding, with the scalings of frequencies that models were stretched by."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from colossax.nn.config import RopeConfig, YarnScaling


def frequencies(config: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians per position, `[head_dim / 2]`, float32."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
    freqs = (1.0 / (config.theta**exponents)).astype(np.float32) / config.linear_factor
    scaling = config.llama3
    if config.yarn is not None:
        return _stretched(freqs, config.yarn, config.theta)
    if scaling is None:
        return freqs.astype(np.float32)
    wavelength = 2 * math.pi / freqs
    turns = scaling.original_max_positions / wavelength
    span = scaling.high_freq_factor - scaling.low_freq_factor
    beyond = turns - scaling.low_freq_factor
    keep = np.clip(beyond / span, 0.0, 1.0) if span else beyond >= 0
    return (freqs * keep + freqs / scaling.factor * (1 - keep)).astype(np.float32)


def _stretched(freqs: np.ndarray, yarn: YarnScaling, theta: float) -> np.ndarray:
    """YaRN: dims are kept up to the one of `beta_fast` turns, divided from that of `beta_slow`."""
    head_dim = 2 * len(freqs)

    def dim_of(turns: float) -> float:
        wavelength = yarn.original_max_positions / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    low, high = dim_of(yarn.beta_fast), dim_of(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high = high + 0.001 if low == high else high
    divided = np.clip((np.arange(len(freqs), dtype=np.float32) - low) / (high - low), 0.0, 1.0)
    return (freqs / yarn.factor * divided + freqs * (1 - divided)).astype(np.float32)


def rope_tables(
    positions: Int[Array, "b s *axes"],
    config: RopeConfig,
    head_dim: int,
    lengths: Int[Array, "b s"] | None = None,
) -> tuple[Float[Array, "b s 1 h2"], Float[Array, "b s 1 h2"]]:
    """Cosines and sines of every position, float32, broadcastable over heads.

    Args:
        positions: Of tokens; `[b, s, axes]` where `config.sections` names several axes, or one
            number for all of them.
        config: Base and scaling.
        head_dim: Dims of a head; those that turn are `config.turned(head_dim)`, of which `h2` is
            half.
        lengths: Of each token's document, see `document_lengths`, where the scaling depends on it;
            None: of its row.
    """
    dims = config.turned(head_dim)
    freqs: Any = frequencies(config, dims)
    if config.sections is not None:
        return _by_axis(positions, config, dims)
    if config.stretched_from is not None:
        if lengths is None:
            lengths = jnp.broadcast_to(positions.max(axis=-1, keepdims=True) + 1, positions.shape)
        freqs = _by_length(freqs, config, dims, lengths[..., None, None])
    angles = positions[..., None, None].astype(jnp.float32) * freqs
    magnitude = _magnitude(config)
    if magnitude == 1.0:
        return jnp.cos(angles), jnp.sin(angles)
    return jnp.cos(angles) * magnitude, jnp.sin(angles) * magnitude


def turn_tables(
    by: Int[Array, "b s"], config: RopeConfig, head_dim: int
) -> tuple[Float[Array, "b s 1 h2"], Float[Array, "b s 1 h2"]]:
    """Tables that turn by so many positions what has been turned, and lengthen nothing.

    Args:
        by: May be negative.
        config: Without frequencies that depend on lengths, and of one axis.
        head_dim: See `rope_tables`.
    """
    angles = by[..., None, None].astype(jnp.float32) * frequencies(config, config.turned(head_dim))
    return jnp.cos(angles), jnp.sin(angles)


def _by_axis(
    positions: Int[Array, "b s *axes"], config: RopeConfig, dims: int
) -> tuple[Float[Array, "b s 1 h2"], Float[Array, "b s 1 h2"]]:
    """Tables of positions of several axes: of each pair of dims by the axis that it has."""
    assert config.sections is not None
    count = len(config.sections)
    freqs = frequencies(config, dims // count if config.restart else dims)
    freqs = np.tile(freqs, count) if config.restart else freqs
    if positions.ndim == 2:
        positions = jnp.broadcast_to(positions[..., None], (*positions.shape, count))
    axis = np.repeat(np.arange(count), config.sections)
    angles = positions[..., axis].astype(jnp.float32)[:, :, None] * freqs
    magnitude = _magnitude(config)
    return jnp.cos(angles) * magnitude, jnp.sin(angles) * magnitude


def document_lengths(
    documents: Int[Array, "b s"], positions: Int[Array, "b s"]
) -> Int[Array, "b s"]:
    """Of each token, the highest position of its document that is among a row's, plus 1.

    Args:
        documents: Their numbers.
        positions: Of tokens.

    Cost: `b s^2` comparisons, of which none is kept.
    """
    same = documents[:, :, None] == documents[:, None, :]
    return jnp.max(jnp.where(same, positions[:, None, :], -1), axis=2) + 1


def _magnitude(config: RopeConfig) -> float:
    if config.yarn is not None:
        return config.yarn.magnitude
    return 1.0 if config.long is None else config.long.magnitude


def _by_length(
    freqs: np.ndarray, config: RopeConfig, dims: int, lengths: Int[Array, "b s 1 1"]
) -> Float[Array, "b s 1 h2"]:
    """Frequencies of rows of these lengths, from those of short rows without scaling."""
    if config.long is not None:
        short, long = (np.asarray(x, np.float32) for x in (config.long.short, config.long.long))
        is_long = lengths > config.long.original_max_positions
        return jnp.where(is_long, freqs / long, freqs / short)
    assert config.dynamic is not None
    factor, most = config.dynamic.factor, config.dynamic.original_max_positions
    # As a multiple of theta: its own powers are the frequencies that are there.
    grown = factor * jnp.maximum(lengths, most).astype(jnp.float32) / most - (factor - 1)
    exponents = np.arange(0, dims, 2, dtype=np.float32) / (dims - 2)
    return jnp.asarray(freqs) * grown**-exponents


def rotate(
    x: Float[Array, "b s n h"],
    tables: tuple[Float[Array, "b s 1 h2"], Float[Array, "b s 1 h2"]],
    *,
    interleaved: bool = False,
) -> Float[Array, "b s n h"]:
    """Rotate pairs (i, i + h2) of the first `2 h2` dims by their angle, in float32.

    Args:
        x: Queries or keys.
        tables: Of `rope_tables`.
        interleaved: Pairs are (2i, 2i + 1). What comes out has them `h2` apart, of queries and keys
            alike: products of both are the same.

    Source: Su et al. 2021, RoFormer; pairs half a head apart are those of most Hugging Face
    checkpoints, neighbours those of the paper and of DeepSeek.
    """
    cos, sin = tables
    dims = 2 * cos.shape[-1]
    if dims < x.shape[-1]:
        turned = rotate(x[..., :dims], tables, interleaved=interleaved)
        return jnp.concatenate([turned, x[..., dims:]], axis=-1)
    x32 = x.astype(jnp.float32)
    if interleaved:
        first, second = x32[..., 0::2], x32[..., 1::2]
    else:
        first, second = jnp.split(x32, 2, axis=-1)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    ).astype(x.dtype)
