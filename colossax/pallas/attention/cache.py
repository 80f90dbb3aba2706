"""Attention of flat tokens to a key-value cache, in its plain form."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .mask import Mask

GATHERED_BYTES = 2**26
"""Keys gathered at once for tokens of many seats; more tokens go chunk by chunk."""


def attend_cache(
    q: Float[Array, "t n h"],
    k: Float[Array, "t k h"],
    v: Float[Array, "t k hv"],
    cache: dict[str, Array],
    layer: int | Int[Array, ""],
    *,
    seat: Int[Array, " t"],
    position: Int[Array, " t"],
    slot: Int[Array, " t"],
    window: tuple[int | None, int | None] | None = None,
    alibi_slopes: Float[Array, " n"] | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    of_kv_heads: Callable[[Array], Array] | None = None,
) -> tuple[Float[Array, "t n hv"], dict[str, Array]]:
    """Write keys and values of flat tokens into the cache, then attend within each one's seat.

    A token sees the slots of its own seat that hold positions up to its own, tokens of this call
    included. In this form a slot's index is the position it holds: `slot` equals `position`, and
    slots below a token's position must have been written.

    Args:
        q: Queries of tokens of any sequences, in any order.
        k: Their keys.
        v: Their values.
        cache: `k` `[layers, seats, slots, k, h]` and `v` `[layers, seats, slots, k, hv]`, whole:
            a slice of a layer would be copied. Donated, or carried by a loop, it is written in
            place.
        layer: Which layer this is; may be traced.
        seat: Row of the cache of each token; a negative one is padding: nothing is written, the
            output is 0.
        position: Position of each token in its sequence.
        slot: Where in the seat its key and value go; outside of the cache nothing is written.
        window: `(left, right)` as of `Mask`: a token sees `left` keys strictly before it, None for
            all; none after it, whatever `right` is.
        alibi_slopes: Penalty per head and unit of distance.
        scale: Default `1 / sqrt(h)`.
        soft_cap: Bound of the logits.
        of_kv_heads: Picks, of keys or values `[slots, k, h]`, the kv heads that q reads, where it
            has the query heads of some only; all are written.

    Returns:
        Output in q's dtype and the cache with the tokens in it.

    Cost: 4 t slots n h FLOPs; with several seats, keys and values of a token's seat are gathered
    for each token, at most `GATHERED_BYTES` or one token's at a time.
    """
    left = Mask(causal=True, window=window).left
    layers, seats, slots = cache["k"].shape[:3]
    # A negative index would count from the end: move it out of range, where it is dropped.
    row = jnp.where(seat < 0, seats, seat)
    column = jnp.where(slot < 0, slots, slot)
    cache = {
        name: cache[name].at[layer, row, column].set(x.astype(cache[name].dtype), mode="drop")
        for name, x in (("k", k), ("v", v))
    }
    t, n, h = q.shape
    pick = of_kv_heads or (lambda x: x)
    kv_heads = jax.eval_shape(pick, k).shape[1]
    grouped = q.reshape(t, kv_heads, n // kv_heads, h)
    slopes = None if alibi_slopes is None else alibi_slopes.reshape(kv_heads, -1)
    scale = h**-0.5 if scale is None else scale

    def weigh(logits: Array, seat: Array, position: Array) -> Array:
        """Softmax of `[t, k, g, slots]` over visible slots; 0 where there are none."""
        logits = logits * scale
        if soft_cap is not None:
            logits = soft_cap * jnp.tanh(logits / soft_cap)
        distance = position[:, None] - jnp.arange(slots, dtype=position.dtype)
        if slopes is not None:
            logits = logits - slopes[None, :, :, None] * distance[:, None, None].astype(jnp.float32)
        seen = (distance >= 0) & (seat >= 0)[:, None]
        if left is not None:
            seen &= distance <= left
        seen = seen[:, None, None]
        top = jnp.max(logits, axis=-1, keepdims=True, where=seen, initial=-jnp.inf)
        weights = jnp.where(seen, jnp.exp(logits - jnp.where(jnp.isneginf(top), 0.0, top)), 0.0)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        return (weights / jnp.where(total == 0, 1.0, total)).astype(cache["v"].dtype)

    f32 = {"preferred_element_type": jnp.float32}

    def one_seat() -> Array:
        keys, values = pick(cache["k"][layer, 0]), pick(cache["v"][layer, 0])
        logits = jnp.einsum("tkgh,ckh->tkgc", grouped.astype(keys.dtype), keys, **f32)
        return jnp.einsum("tkgc,ckh->tkgh", weigh(logits, seat, position), values, **f32)

    def each_seat(tokens: tuple[Array, Array, Array]) -> Array:
        q, seat, position = (x[None] for x in tokens)
        at = jnp.clip(seat[0], 0, seats - 1)
        keys, values = pick(cache["k"][layer, at]), pick(cache["v"][layer, at])
        logits = jnp.einsum("tkgh,ckh->tkgc", q.astype(keys.dtype), keys, **f32)
        return jnp.einsum("tkgc,ckh->tkgh", weigh(logits, seat, position), values, **f32)[0]

    if seats == 1:
        out = one_seat()
    else:
        bytes_each = slots * kv_heads * (h + v.shape[-1]) * cache["k"].dtype.itemsize
        chunk = max(1, min(t, GATHERED_BYTES // bytes_each))
        out = jax.lax.map(each_seat, (grouped, seat, position), batch_size=chunk)
    return out.reshape(t, n, v.shape[-1]).astype(q.dtype), cache
