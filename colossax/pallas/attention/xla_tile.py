"""Attention of one tile of queries to one of keys, and its gradients."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .mask import Mask, visible
from .operands import Operands, Scoring


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """Queries and keys of a tile."""

    q_tile: int
    kv_tile: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens:
    """What the mask says of some queries or keys: `[b or 1, length]` each."""

    position: Any
    segment: Any
    valid: Any


def _logits(
    raw: Array,
    scoring: Scoring,
    rows: Tokens,
    columns: Tokens,
    transposed: bool,
) -> tuple[Array, Array, Any]:
    """Scores `[b, k, g, L, T]` (transposed: `[b, k, T, g, L]`): final, capped, and distances."""
    capped, slopes = raw * scoring.scale, scoring.alibi_slopes
    if scoring.soft_cap is not None:
        capped = scoring.soft_cap * jnp.tanh(capped / scoring.soft_cap)
    logits = sum(scoring.biases, start=capped)
    if slopes is None:
        return logits, capped, None
    if transposed:
        distance = rows.position[:, None, None, None, :] - columns.position[:, None, :, None, None]
        slope = slopes.reshape(1, raw.shape[1], 1, raw.shape[3], 1)
    else:
        distance = rows.position[:, None, None, :, None] - columns.position[:, None, None, None, :]
        slope = slopes.reshape(1, raw.shape[1], raw.shape[2], 1, 1)
    distance = distance.astype(jnp.float32)
    return logits - slope * distance, capped, distance


def _seen(mask: Mask, rows: Tokens, columns: Tokens) -> Any:
    """`[b or 1, L, T]`, or None where everything is visible."""
    if mask.everything and columns.valid is None:
        return None
    return visible(
        mask, rows.position, columns.position, rows.segment, columns.segment, columns.valid
    )


def _kept(
    scoring: Scoring, rows: Tokens, columns: Tokens, shape: tuple[int, int], *, transposed: bool
) -> Array:
    """What probabilities of a tile are multiplied by, as it drops some."""
    return scoring.dropout.tile(rows.position, columns.position, shape, transposed=transposed)


def tile_forward(
    tile: Operands, scoring: Scoring, rows: Tokens, columns: Tokens
) -> tuple[Array, Array, Array]:
    """Maximum and sum of `exp(logit - maximum)` `[b, k, g, L]`, and that sum over v, float32.

    The tile's arrays are `[b, k, m, h]`, `[b, k, T, h]`, `[b, k, T, hv]`.
    """
    q, k, v = tile.q, tile.k, tile.v
    b, kv_heads, m, _ = q.shape
    L, T = rows.position.shape[1], columns.position.shape[1]
    raw = jnp.einsum("bkmh,bkth->bkmt", q, k, preferred_element_type=jnp.float32)
    raw = raw.reshape(b, kv_heads, m // L, L, T)
    logits, _, _ = _logits(raw, scoring, rows, columns, transposed=False)
    seen = _seen(tile.masked, rows, columns)
    if seen is not None:
        logits = jnp.where(seen[:, None, None], logits, -jnp.inf)
    top = jnp.max(logits, axis=-1)
    weights = jnp.exp(logits - finite(top)[..., None])
    total = jnp.sum(weights, axis=-1)
    if scoring.dropout is not None:
        weights = weights * _kept(scoring, rows, columns, (b, kv_heads), transposed=False)
    flat = weights.reshape(b, kv_heads, m, T).astype(v.dtype)
    summed = jnp.einsum("bkmt,bkth->bkmh", flat, v, preferred_element_type=jnp.float32)
    return top, total, summed.reshape(b, kv_heads, m // L, L, v.shape[-1])


def finite(top: Array) -> Array:
    return jnp.where(jnp.isneginf(top), 0.0, top)


def tile_finish(top: Array, total: Array, summed: Array) -> tuple[Array, Array]:
    """Output and log-partition; 0 and -inf for rows that saw nothing."""
    empty = total == 0
    safe = jnp.where(empty, 1.0, total)
    return summed / safe[..., None], jnp.where(empty, -jnp.inf, jnp.log(safe) + top)


def tile_backward(
    tile: Operands,
    scoring: Scoring,
    rows: Tokens,
    columns: Tokens,
    dout: Array,
    lse: Array,
    delta: Array,
) -> tuple[Array, Array, Array, Any, Array]:
    """Gradients of one tile: dq `[b, k, h, m]`, dk, dv `[b, k, T, h]`, dslopes `[k, g]`, dlogits.

    The last is `[b, k, T, g, L]`, that of the final logits. Scores stand transposed, keys first:
    four of the five matmuls then have operands as they lie in memory, for which XLA's CPU matmul
    is fastest.
    """
    q, k, v = tile.q, tile.k, tile.v
    b, kv_heads, m, _ = q.shape
    L, T = rows.position.shape[1], columns.position.shape[1]
    tall = (b, kv_heads, T, m // L, L)
    f32 = {"preferred_element_type": jnp.float32}
    raw = jnp.einsum("bkth,bkmh->bktm", k, q, **f32).reshape(tall)
    logits, capped, distance = _logits(raw, scoring, rows, columns, transposed=True)
    exponent = logits - lse.reshape(b, kv_heads, 1, m // L, L)
    seen = _seen(tile.masked, rows, columns)
    if seen is not None:
        seen = jnp.swapaxes(seen, 1, 2)[:, None, :, None, :]
        exponent = jnp.where(seen, exponent, -jnp.inf)
    p = jnp.exp(exponent)
    dp = jnp.einsum("bkth,bkmh->bktm", v, dout, **f32).reshape(tall)
    of_v = p
    if scoring.dropout is not None:
        kept = _kept(scoring, rows, columns, (b, kv_heads), transposed=True)
        dp, of_v = dp * kept, p * kept
    ds = p * (dp - delta.reshape(b, kv_heads, 1, m // L, L))
    dlogits = ds
    dslopes = None if distance is None else -jnp.sum(ds * distance, axis=(0, 2, 4))
    if scoring.soft_cap is not None:
        ds = ds * (1 - jnp.square(capped / scoring.soft_cap))
    ds = (ds * scoring.scale).reshape(b, kv_heads, T, m).astype(q.dtype)
    of_v = of_v.reshape(b, kv_heads, T, m).astype(dout.dtype)
    dq = jnp.einsum("bkth,bktm->bkhm", k, ds, **f32)
    dk = jnp.einsum("bktm,bkmh->bkth", ds, q, **f32)
    dv = jnp.einsum("bktm,bkmh->bkth", of_v, dout, **f32)
    return dq, dk, dv, dslopes, dlogits
