"""All-gather attention: every rank fetches all keys and values, then attends once.

Cheap to start and simple to schedule; it holds the keys of the whole sequence for a moment, which
few kv heads or a short sequence allow.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from colossax.pallas.attention import Mask, attend_block, block_gradients, row_delta, with_sinks

from .axes import Packing, RingAxes
from .order import Order, check_order, positions_local
from .step import Settings


def gather_attention_local(
    q: Float[Array, "b s n h"],
    k: Float[Array, "b t k h"],
    v: Float[Array, "b t k hv"],
    *,
    mask: Mask,
    alibi_slopes: Float[Array, " n"] | None = None,
    scale: float,
    soft_cap: float | None = None,
    sinks: Float[Array, " n"] | None = None,
    axes: RingAxes,
    order: str = Order.ZIGZAG,
    implementation: str = "auto",
) -> tuple[Float[Array, "b s n hv"], Float[Array, "b n s"]]:
    """Exact softmax attention of one rank's queries to the keys of all R ranks, gathered.

    Arguments, result and refusals are those of `ring_attention_local`.

    Cost, per device: KV = b t k (h + hv) items of k's dtype. Forward gathers, sending (R - 1) KV;
    backward gathers again and reduce-scatters float32 gradients, (R - 1) KV items. Holds R KV and,
    backward, R KV items in float32. Residuals are those of the ring. XLA keeps what was gathered
    for the backward pass where both are in one computation; loops and `jax.checkpoint` part them.
    """
    check_order(order, q.shape[1], axes.size)
    check_order(order, k.shape[1], axes.size)
    settings = Settings(
        axes=axes,
        order=str(order),
        scale=scale,
        soft_cap=soft_cap,
        implementation=implementation,
    )
    slopes = None if alibi_slopes is None else alibi_slopes.astype(jnp.float32)
    out, lse = _attend(settings, q, k, v, slopes, mask)
    return (out, lse) if sinks is None else with_sinks(out, lse, sinks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(settings: Settings, q: Any, k: Any, v: Any, slopes: Any, mask: Mask) -> Any:
    k, v, options = _whole_local(settings, q, k, v, slopes, mask)
    out, lse = attend_block(q, k, v, **options)
    return out.astype(q.dtype), lse


def _attend_fwd(settings: Settings, q: Any, k: Any, v: Any, slopes: Any, mask: Mask) -> Any:
    out, lse = (checkpoint_name(x, "attention") for x in _attend(settings, q, k, v, slopes, mask))
    return (out, lse), (q, k, v, slopes, mask, out, lse)


def _attend_bwd(settings: Settings, saved: Any, cotangents: Any) -> Any:
    q, k, v, slopes, mask, out, lse = saved
    dout, dlse = cotangents
    delta = row_delta(out, lse, dout, dlse)
    all_k, all_v, options = _whole_local(settings, q, k, v, slopes, mask)
    dq, dk, dv, dslopes = block_gradients(
        q, all_k, all_v, **options, dout=dout, lse=lse, delta=delta
    )
    packing = Packing.of((k, v))
    ranks = (_by_rank(x, settings.axes.size, settings.order) for x in (dk, dv))
    dk, dv = packing.unpack(
        tuple(
            jax.lax.psum_scatter(x, settings.axes.circle.names, scatter_dimension=0)
            for x in jax.vmap(packing.pack)(tuple(ranks))
        )
    )
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), dslopes, None


_attend.defvjp(_attend_fwd, _attend_bwd)


def _whole_local(
    settings: Settings, q: Array, k: Array, v: Array, slopes: Any, mask: Mask
) -> tuple[Array, Array, dict[str, Any]]:
    """Keys and values of the whole sequence in natural order, and how to attend to them."""
    axes = settings.axes
    names = ("kv_positions", "kv_segments", "kv_valid")
    shards = k, v, {name: getattr(mask, name) for name in names}
    packing = Packing.of(shards)
    gathered = (jax.lax.all_gather(x, axes.circle.names) for x in packing.pack(shards))
    by_rank = jax.vmap(packing.unpack)(tuple(gathered))
    k, v, of_keys = jax.tree.map(functools.partial(_natural, order=settings.order), by_rank)
    if mask.q_positions is None and (mask.ordered or slopes is not None):
        of_keys["q_positions"] = positions_local(
            axes.source_local(), length=q.shape[1], ranks=axes.size, order=settings.order
        )
    options = {
        "mask": dataclasses.replace(mask, ascending=mask.ascends, **of_keys),
        "alibi_slopes": slopes,
        "scale": settings.scale,
        "soft_cap": settings.soft_cap,
        "implementation": settings.implementation,
    }
    return k, v, options


def _natural(x: Array, *, order: str) -> Array:
    """`[R, b, t, ...]`, shard by shard, as `[b, R t, ...]` in natural order of tokens."""
    if order == Order.ZIGZAG:
        first, second = jnp.split(x, 2, axis=2)
        x = jnp.concatenate([first, second[::-1]])
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _by_rank(x: Array, ranks: int, order: str) -> Array:
    """Undoes `_natural`."""
    chunks = 2 * ranks if order == Order.ZIGZAG else ranks
    x = jnp.moveaxis(x.reshape(x.shape[0], chunks, -1, *x.shape[2:]), 1, 0)
    if order == Order.ZIGZAG:
        x = jnp.concatenate([x[:ranks], x[ranks:][::-1]], axis=2)
    return x
