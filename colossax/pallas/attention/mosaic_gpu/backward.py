"""Gradients of attention to ranges of keys; all scores at once, until the kernels are here."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def gradients(
    q: Float[Array, "b s n h"],
    k: Float[Array, "b t k h"],
    v: Float[Array, "b t k hv"],
    *,
    lo: Int[Array, "_ s"],
    hi: Int[Array, "_ s"],
    bias: Float[Array, "_ _ s t"] | None = None,
    dout: Float[Array, "b s n hv"],
    lse: Float[Array, "b n s"],
    delta: Float[Array, "b n s"],
    scale: float,
    soft_cap: float | None = None,
    dtype: Any,
    interpret: bool = False,
) -> tuple[Array, Array, Array, Array | None]:
    """dq, dk, dv in `dtype`, and the bias's gradient, from the forward pass's lse and `row_delta`.

    Cost: arrays of b n s t items.
    """
    b, t, kv_heads = k.shape[:3]
    f32 = {"preferred_element_type": jnp.float32}
    group = q.shape[2] // kv_heads
    wide_k, wide_v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    raw = jnp.einsum("bsnh,btnh->bnst", q, wide_k, **f32) * scale
    capped = raw if soft_cap is None else soft_cap * jnp.tanh(raw / soft_cap)
    logits = capped if bias is None else capped + bias
    key = jnp.arange(t)
    seen = ((key >= lo[..., None]) & (key < hi[..., None]))[:, None]
    p = jnp.where(seen, jnp.exp(logits - lse[..., None]), 0)
    ds = p * (jnp.einsum("bsnh,btnh->bnst", dout, wide_v, **f32) - delta[..., None])
    dbias = None
    if bias is not None:
        over = tuple(i for i in (0, 1) if bias.shape[i] == 1)
        dbias = jnp.sum(ds, axis=over, keepdims=True)
    if soft_cap is not None:
        ds = ds * (1 - jnp.square(capped / soft_cap))
    ds = (ds * scale).astype(q.dtype)
    dq = jnp.einsum("bnst,btnh->bsnh", ds, wide_k, **f32)
    dk = jnp.einsum("bnst,bsnh->btnh", ds, q, **f32)
    dv = jnp.einsum("bnst,bsnh->btnh", p.astype(q.dtype), dout.astype(q.dtype), **f32)
    dk, dv = (x.reshape(b, t, kv_heads, group, -1).sum(3) for x in (dk, dv))
    return dq.astype(dtype), dk.astype(dtype), dv.astype(dtype), dbias
