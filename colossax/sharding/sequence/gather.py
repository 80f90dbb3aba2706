"""All-gather attention: every rank fetches all keys and values, then attends once.

Cheap to start and simple to schedule; it holds the keys of the whole sequence for a moment, which
few kv heads or a short sequence allow.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from colossax.pallas.attention import (
    Operands,
    Scoring,
    backward_block,
    forward_block,
    row_delta,
    with_sinks,
)

from .axes import Packing
from .order import Order, positions_local
from .step import Settings


def gather_attention_local(
    operands: Operands, scoring: Scoring, settings: Settings
) -> tuple[Float[Array, "b s n hv"], Float[Array, "b n s"]]:
    """Exact softmax attention of one rank's queries to the keys of all R ranks, gathered.

    Arguments, result and refusals are those of `ring_attention_local`.

    Cost, per device: KV = b t k (h + hv) items of k's dtype. Forward gathers, sending (R - 1) KV;
    backward gathers again and reduce-scatters float32 gradients, (R - 1) KV items. Holds R KV and,
    backward, R KV items in float32. Residuals are those of the ring. XLA keeps what was gathered
    for the backward pass where both are in one computation; loops and `jax.checkpoint` part them.
    """
    settings.check(operands)
    out, lse = _attend(settings, operands, scoring.without_sinks)
    return (out, lse) if scoring.sinks is None else with_sinks(out, lse, scoring.sinks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(settings: Settings, operands: Operands, scoring: Scoring) -> Any:
    full = _gather_local(settings, operands, scoring)
    out, lse = forward_block(full, scoring, implementation=settings.implementation)
    return out.astype(operands.q.dtype), lse


def _attend_fwd(settings: Settings, operands: Operands, scoring: Scoring) -> Any:
    outputs = _attend(settings, operands, scoring)
    out, lse = (checkpoint_name(x, "attention") for x in outputs)
    return (out, lse), (operands, scoring, out, lse)


def _attend_bwd(settings: Settings, saved: Any, cotangents: Any) -> Any:
    operands, scoring, out, lse = saved
    dout, dlse = cotangents
    given = {"dout": dout, "lse": lse, "delta": row_delta(out, lse, dout, dlse)}
    full = _gather_local(settings, operands, scoring)
    gradients, of_scoring = backward_block(
        full, scoring, **given, implementation=settings.implementation
    )
    packing = Packing.of((operands.k, operands.v))
    ranks = (_by_rank(x, settings.axes.size, settings.order) for x in (gradients.k, gradients.v))
    dk, dv = packing.unpack(
        tuple(
            jax.lax.psum_scatter(x, settings.axes.circle.names, scatter_dimension=0)
            for x in jax.vmap(packing.pack)(tuple(ranks))
        )
    )
    return operands.gradients(gradients.q, dk, dv), of_scoring


_attend.defvjp(_attend_fwd, _attend_bwd)


def _gather_local(settings: Settings, operands: Operands, scoring: Scoring) -> Operands:
    """With keys and values of the whole sequence, in natural order."""
    axes, mask = settings.axes, operands.masked
    names = ("kv_positions", "kv_segments", "kv_valid")
    shards = operands.k, operands.v, {name: getattr(mask, name) for name in names}
    packing = Packing.of(shards)
    gathered = (jax.lax.all_gather(x, axes.circle.names) for x in packing.pack(shards))
    by_rank = jax.vmap(packing.unpack)(tuple(gathered))
    k, v, of_keys = jax.tree.map(functools.partial(_natural, order=settings.order), by_rank)
    if mask.q_positions is None and (mask.ordered or scoring.by_distance):
        of_keys["q_positions"] = positions_local(
            axes.source_local(),
            length=operands.lengths[0],
            ranks=axes.size,
            order=settings.order,
        )
    mask = mask.changed(ascending=mask.ascends, **of_keys)
    return operands.replace(k=k, v=v, mask=mask)


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
