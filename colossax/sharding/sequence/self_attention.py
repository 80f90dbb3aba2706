"""Ring Self-Attention as it was first written: a ring of keys, a softmax, a ring of values.

The plain form of sequence parallelism that the others are held to. All scores of a rank's queries
are alive at once, and plain autodiff keeps every block that passes.

Reference: Li et al. 2021, Sequence Parallelism: Long Sequence Training from System Perspective.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from colossax.pallas.attention import Operands, Scoring, dense, with_sinks

from .axes import RingAxes
from .order import positions_local
from .settings import Settings


def ring_self_attention_local(
    operands: Operands, scoring: Scoring, settings: Settings
) -> tuple[Float[Array, "b s n hv"], Float[Array, "b n s"]]:
    """Exact softmax attention of one rank's queries to the keys of all R ranks.

    Arguments, result and refusals are those of `ring_attention_local`. The implementation that
    settings name is no matter here: scores are computed as they are written.

    Cost, per device: sends (R - 1) blocks of k and, after them, of v, and backward as much; holds
    b n s R t scores in float32, several times.
    """
    settings.check(operands)
    q, k, v, mask = operands.q, operands.k, operands.v, operands.masked
    axes, soft_cap = settings.axes, scoring.soft_cap
    b, s, n, h = q.shape
    t, kv_heads = k.shape[1:3]
    grouped = q.astype(jnp.float32).reshape(b, s, kv_heads, n // kv_heads, h)
    keys = {
        "k": k,
        "kv_positions": mask.kv_positions,
        "kv_segments": mask.kv_segments,
        "kv_valid": mask.kv_valid,
    }

    def natural(offset: Any, length: int) -> Array:
        source = (axes.source_local() - offset) % axes.size
        return positions_local(source, length=length, ranks=axes.size, order=settings.order)

    q_positions = natural(0, s) if mask.q_positions is None else mask.q_positions

    def logits(keys: dict[str, Any], offset: Array) -> Array:
        k, of_keys = keys["k"], {name: x for name, x in keys.items() if name != "k"}
        if of_keys["kv_positions"] is None:
            of_keys["kv_positions"] = natural(offset, t)
        scores = jnp.einsum("bskgh,btkh->bkgst", grouped, k.astype(jnp.float32)) * scoring.scale
        scores = scores.reshape(b, n, s, t)
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        if scoring.alibi_slopes is not None:
            distance = q_positions[:, None, :, None] - of_keys["kv_positions"][:, None, None]
            scores -= scoring.alibi_slopes.astype(jnp.float32)[:, None, None] * distance
        for bias in scoring.relative:
            scores += bias.of(q_positions, of_keys["kv_positions"])
        here = mask.changed(q_positions=q_positions, **of_keys)
        return jnp.where(dense(here, s, t), scores, -jnp.inf)

    def weighted(block: tuple[Array, Any], of_step: tuple[Array, Array]) -> Array:
        (v, kv_positions), (probabilities, offset) = block, of_step
        if scoring.dropout is not None:
            places = natural(offset, t) if kv_positions is None else kv_positions
            probabilities = probabilities * scoring.dropout.factors(q_positions, places)
        grouped = probabilities.reshape(b, kv_heads, n // kv_heads, s, t)
        values = jnp.einsum("bkgst,btkh->bskgh", grouped, v.astype(jnp.float32))
        return values.reshape(b, s, n, -1)

    offsets = jnp.arange(axes.size, dtype=jnp.int32)
    scores = _around_local(axes, keys, logits, offsets)
    probabilities, lse = _softmax(scores)
    # Positions of keys come round again only where some are dropped by them.
    values = v, None if scoring.dropout is None else mask.kv_positions
    out = jnp.sum(_around_local(axes, values, weighted, (probabilities, offsets)), axis=0)
    out = out.astype(q.dtype)
    return (out, lse) if scoring.sinks is None else with_sinks(out, lse, scoring.sinks)


def _around_local(axes: RingAxes, block: Any, visit: Any, of_step: Any) -> Array:
    """`visit(block, of_step[i])` of the block `i` places back, stacked over all R steps.

    `of_step` is a tree of arrays, of each of which a step gets its own.
    """

    def step(block: Any, of_this: Any) -> tuple[Any, Array]:
        block = axes.circle.shift_local(block, 1)
        return block, visit(block, of_this)

    first = visit(block, jax.tree.map(lambda x: x[0], of_step))
    _, others = jax.lax.scan(step, block, jax.tree.map(lambda x: x[1:], of_step))
    return jnp.concatenate([first[None], others])


def _softmax(scores: Float[Array, "R b n s t"]) -> tuple[Array, Array]:
    """Over keys of all blocks; 0 and -inf where none is visible."""
    top = jnp.max(scores, axis=(0, 4), keepdims=True)
    top = jax.lax.stop_gradient(jnp.where(jnp.isneginf(top), 0.0, top))
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=(0, 4), keepdims=True)
    empty = total == 0
    total = jnp.where(empty, 1.0, total)
    lse = jnp.where(empty, -jnp.inf, jnp.log(total) + top)
    return weights / total, lse[0, ..., 0]
