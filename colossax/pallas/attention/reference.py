"""Softmax attention as it is written down, in float32: the truth, and slow."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from colossax.pallas.target import Target

from .mask import dense, positions
from .operands import Operands, Scoring
from .relative import RelativeBias
from .spec import AttentionSpec


def why_not(spec: AttentionSpec, target: Target) -> str | None:
    """It takes everything everywhere."""
    return None


def attend(
    operands: Operands, scoring: Scoring
) -> tuple[Float[Array, "*b s n hv"], Float[Array, "*b n s"]]:
    """`softmax(cap(q k scale) + biases + alibi) v` and its log-partition, see `api.attention`.

    Cost: several float32 arrays of n s t items per batch row.
    """
    q, k, v, mask = operands.q, operands.k, operands.v, operands.masked
    alibi_slopes, sinks, soft_cap = scoring.alibi_slopes, scoring.sinks, scoring.soft_cap
    heads, kv_heads = q.shape[-2], k.shape[-2]
    s, t = operands.lengths
    wide_q, wide_k, wide_v = (x.astype(jnp.float32) for x in (q, k, v))
    grouped = wide_q.reshape(*q.shape[:-2], kv_heads, heads // kv_heads, q.shape[-1])
    exact = jax.lax.Precision.HIGHEST
    logits = jnp.einsum("...skgh,...tkh->...kgst", grouped, wide_k, precision=exact) * scoring.scale
    logits = logits.reshape(*q.shape[:-3], heads, s, t)
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    q_places, kv_places = positions(mask.q_positions, s), positions(mask.kv_positions, t)
    for bias in scoring.biases:
        related = isinstance(bias, RelativeBias)
        logits = logits + (bias.of(q_places, kv_places) if related else bias.astype(jnp.float32))
    if alibi_slopes is not None:
        distance = q_places[..., None, :, None] - kv_places[..., None, None, :]
        distance = distance.astype(jnp.float32)
        logits = logits - alibi_slopes.astype(jnp.float32)[:, None, None] * distance
    seen = dense(mask, s, t)
    # Where nothing is visible the maximum is -inf; shifting by 0 instead keeps NaN out.
    logits = jnp.where(seen, logits, -jnp.inf)
    extra = None if sinks is None else sinks.astype(jnp.float32)[:, None, None]
    top = jnp.max(logits, axis=-1, keepdims=True)
    top = top if extra is None else jnp.maximum(top, extra)
    shift = jax.lax.stop_gradient(jnp.where(jnp.isneginf(top), 0.0, top))
    weights = jnp.where(seen, jnp.exp(logits - shift), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    total = total if extra is None else total + jnp.exp(extra - shift)
    empty = total == 0
    total = jnp.where(empty, 1.0, total)
    lse = jnp.where(empty, -jnp.inf, jnp.log(total) + shift)[..., 0]
    probabilities = weights / total
    if scoring.dropout is not None:
        probabilities = probabilities * scoring.dropout.factors(q_places, kv_places)
    probabilities = probabilities.reshape(*q.shape[:-3], kv_heads, heads // kv_heads, s, t)
    out = jnp.einsum("...kgst,...tkh->...skgh", probabilities, wide_v, precision=exact)
    return out.reshape(*q.shape[:-1], v.shape[-1]).astype(q.dtype), lse
