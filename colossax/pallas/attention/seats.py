"""Attention of flat tokens to rows of a cache, one for each seat, in its plain form."""

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .codes import read_kept, without_scales
from .pages import Scores

if TYPE_CHECKING:
    from .cache import ReadSlots

GATHERED_BYTES = 2**26
"""Keys gathered at once for tokens of many seats; more tokens go chunk by chunk."""


def attend_seats(
    q: Float[Array, "t k r h"],
    cache: dict[str, Array],
    layer: int | Int[Array, ""],
    *,
    seat: Int[Array, " t"],
    position: Int[Array, " t"],
    scores: Scores,
    read: "ReadSlots",
) -> Float[Array, "t k r hv"]:
    """What tokens see of their own seats' rows, up to their positions; float32.

    Args:
        q: Queries, by kv head.
        cache: What is kept, `[layers, seats, slots, k, ...]`, whole.
        layer: Which.
        seat: Of each token; negative: it sees nothing, and gets 0.
        position: Of each token.
        scores: How keys are seen; where `reach` is bounded, slots are taken in turn.
        read: Keys and values from what slots hold.

    Cost: 4 t slots k r h FLOPs; with several seats, keys and values of a token's seat are gathered
    for each token, at most `GATHERED_BYTES` or one token's at a time.
    """
    plain = without_scales(cache)
    seats = next(iter(plain.values())).shape[1]
    within = functools.partial(_within, cache, layer, scores=scores, read=read)
    if seats == 1:
        return within(0, q, seat, position)

    def each(token: tuple[Array, ...]) -> Array:
        q, seat, position = (x[None] for x in token)
        return within(jnp.clip(seat[0], 0, seats - 1), q, seat, position)[0]

    one = {name: jax.ShapeDtypeStruct(x.shape[2:], x.dtype) for name, x in plain.items()}
    bytes_each = sum(x.size * x.dtype.itemsize for x in jax.eval_shape(read, one))
    at_once = max(1, min(len(q), GATHERED_BYTES // bytes_each))
    return jax.lax.map(each, (q, seat, position), batch_size=at_once)


def _within(
    cache: dict[str, Array],
    layer: int | Int[Array, ""],
    at: int | Array,
    q: Array,
    seat: Array,
    position: Array,
    *,
    scores: Scores,
    read: "ReadSlots",
) -> Array:
    """Of tokens of one seat."""
    held = {name: x[layer, at] for name, x in cache.items()}
    keys, values, key_scales, value_scales = read_kept(read, held, q.dtype)
    f32 = {"preferred_element_type": jnp.float32}
    logits = jnp.einsum("tkgh,ckh->tkgc", q.astype(keys.dtype), keys, **f32)
    logits = logits if key_scales is None else logits * key_scales.T[:, None]
    weights = _weights(logits, seat, position, scores)
    weights = weights if value_scales is None else weights * value_scales.T[:, None]
    return jnp.einsum("tkgc,ckh->tkgh", weights.astype(values.dtype), values, **f32)


def _weights(logits: Array, seat: Array, position: Array, scores: Scores) -> Array:
    """Softmax of `[t, k, g, slots]` over visible slots; 0 where there are none."""
    slots, left, sinks = logits.shape[-1], scores.reach, scores.sinks
    logits = logits * scores.scale
    if scores.soft_cap is not None:
        logits = scores.soft_cap * jnp.tanh(logits / scores.soft_cap)
    distance = position[:, None] - jnp.arange(slots, dtype=position.dtype)
    if left is not None:
        distance %= slots  # what a later token has written here is out of the window
    if scores.slopes is not None:
        away = distance[:, None, None].astype(jnp.float32)
        logits = logits - scores.slopes[None, :, :, None] * away
    for bias in scores.biases:
        by_head = bias.of(position, jnp.arange(slots, dtype=position.dtype))
        logits = logits + jnp.moveaxis(by_head, 0, 1).reshape(logits.shape)
    seen = (distance >= 0) & (seat >= 0)[:, None]
    if left is not None:
        seen &= distance <= jnp.minimum(position, left)[:, None]
    if scores.chunk is not None:
        seen &= distance <= (position % scores.chunk)[:, None]
    seen = seen[:, None, None]
    top = jnp.max(logits, axis=-1, keepdims=True, where=seen, initial=-jnp.inf)
    extra = None if sinks is None else sinks[None, ..., None]
    top = top if extra is None else jnp.maximum(top, extra)
    top = jnp.where(jnp.isneginf(top), 0.0, top)
    weights = jnp.where(seen, jnp.exp(logits - top), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    total = total if extra is None else total + jnp.exp(extra - top)
    return weights / jnp.where(total == 0, 1.0, total)
