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
from .masks import gathered_masks_local, natural
from .order import Order
from .settings import Settings


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
    shards = operands.k, operands.v
    packing = Packing.of(shards)
    names = settings.axes.circle.names
    gathered = tuple(jax.lax.all_gather(x, names) for x in packing.pack(shards))
    by_rank = jax.vmap(packing.unpack)(gathered)
    k, v = (natural(x, order=settings.order) for x in by_rank)
    mask = gathered_masks_local(settings, operands, scoring).of_own
    return operands.replace(k=k, v=v, mask=mask)


def _by_rank(x: Array, ranks: int, order: str) -> Array:
    """Undoes `natural`."""
    chunks = 2 * ranks if order == Order.ZIGZAG else ranks
    x = jnp.moveaxis(x.reshape(x.shape[0], chunks, -1, *x.shape[2:]), 1, 0)
    if order == Order.ZIGZAG:
        x = jnp.concatenate([x[:ranks], x[ranks:][::-1]], axis=2)
    return x
