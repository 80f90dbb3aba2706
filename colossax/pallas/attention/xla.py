"""Blockwise attention in plain XLA: memory grows with the sequence, not with its square.

The forward pass keeps the output and the log-partition; the backward pass computes every block of
probabilities again from them. Query heads of one kv head are rows of one matrix, so nothing is
repeated. Shapes inside: b batch, k kv heads, g query heads per kv head, L queries and T keys of a
tile, m = g L rows.

Two drivers share the arithmetic of a tile. Short sequences unroll a few query tiles, each against
the static slice of keys that a causal mask or a window leaves it. Long ones loop over query tiles
and, inside, over the key tiles from the first to the last that any row of the tile can see.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from colossax.pallas.target import Target
from colossax.pallas.varying import vary_alike, zeros_like_varying

from .mask import Mask, positions, visible
from .spec import AttentionSpec

UNROLLED_SCORES = 2**20
"""Up to this many (query, key) pairs the unrolled driver runs, with whole rows of keys."""

UNROLLED_TILES = 4
SMALLEST_TILE = 128
# Measured on a CPU, 8 x 256 tokens, 4 / 2 heads of 64, float32, forward and backward: one tile
# 31 ms, two 24 ms, four 22 ms of CPU time, but 0.7, 1.2 and 2.7 s to compile.

LOOP_TILE = 512


def why_not(spec: AttentionSpec, target: Target) -> str | None:
    """Biases are all it lacks: their gradient is an array of the size that it avoids."""
    if spec.biases:
        return "biases have no blockwise form here; implementation 'reference' takes them"
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Static:
    """What a trace depends on; `tile` is the loops' tile, None to unroll."""

    scale: float
    soft_cap: float | None
    tile: int | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tokens:
    """What the mask says of some queries or keys: `[b or 1, length]` each."""

    position: Any
    segment: Any
    valid: Any

    def slice(self, lo: int, hi: int) -> "_Tokens":
        return jax.tree.map(lambda x: x[:, lo:hi], self)


def attend(
    q: Float[Array, "b s n h"],
    k: Float[Array, "b t k h"],
    v: Float[Array, "b t k hv"],
    *,
    mask: Mask,
    biases: Sequence[Array] = (),
    alibi_slopes: Float[Array, " n"] | None = None,
    scale: float,
    soft_cap: float | None = None,
    sinks: Float[Array, " n"] | None = None,
) -> tuple[Float[Array, "b s n hv"], Float[Array, "b n s"]]:
    """Attention and its log-partition, see `api.attention`.

    Cost: 4 s t n h FLOPs a row forward, 10 backward, less what the mask leaves out by whole tiles;
    residuals are the inputs, the output and 4 bytes per query and head; scores of one tile are
    alive at a time. tests/pallas/attention/test_xla.py counts the memory.
    """
    slopes = None if alibi_slopes is None else alibi_slopes.astype(jnp.float32)
    operands = vary_alike((q, k, v, slopes, mask))
    tile = LOOP_TILE if q.shape[1] * k.shape[1] > UNROLLED_SCORES else None
    out, lse = _attend(_Static(scale=scale, soft_cap=soft_cap, tile=tile), *operands)
    if sinks is None:
        return out, lse
    # A sink only scales the output: exp(lse) / (exp(lse) + exp(sink)).
    sink = sinks.astype(jnp.float32)[:, None]
    share = jnp.swapaxes(jax.nn.sigmoid(lse - sink), 1, 2)[..., None]
    return (out * share).astype(q.dtype), jnp.logaddexp(lse, sink)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: _Static, q: Any, k: Any, v: Any, slopes: Any, mask: Mask) -> Any:
    return _forward(static, q, k, v, slopes, mask)


def _attend_fwd(static: _Static, q: Any, k: Any, v: Any, slopes: Any, mask: Mask) -> Any:
    out, lse = _forward(static, q, k, v, slopes, mask)
    return (out, lse), (q, k, v, slopes, mask, out, lse)


def _attend_bwd(static: _Static, saved: Any, cotangents: Any) -> Any:
    q, k, v, slopes, mask, out, lse = saved
    dout, dlse = cotangents
    # d loss / d score = p (dp - delta); the log-partition's own gradient adds p dlse.
    delta = jnp.einsum("bsnh,bsnh->bns", out, dout, preferred_element_type=jnp.float32) - dlse
    # Rows that see nothing: exp(score - inf) = 0, so no gradient and no NaN.
    lse = jnp.where(jnp.isneginf(lse), jnp.inf, lse)
    backward = _backward_unrolled if static.tile is None else _backward_loop
    dq, dk, dv, dslopes = backward(static, q, k, v, slopes, mask, dout, lse, delta)
    if slopes is not None:
        dslopes = dslopes.reshape(slopes.shape)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), dslopes, None


_attend.defvjp(_attend_fwd, _attend_bwd)


def _forward(static: _Static, q: Any, k: Any, v: Any, slopes: Any, mask: Mask) -> Any:
    forward = _forward_unrolled if static.tile is None else _forward_loop
    return forward(static, q, k, v, slopes, mask)


# ---- one tile ------------------------------------------------------------------------------------


def _logits(
    static: _Static, raw: Array, slopes: Any, rows: _Tokens, columns: _Tokens, transposed: bool
) -> tuple[Array, Array, Any]:
    """Scores `[b, k, g, L, T]` (transposed: `[b, k, T, g, L]`): final, capped, and distances."""
    capped = raw * static.scale
    if static.soft_cap is not None:
        capped = static.soft_cap * jnp.tanh(capped / static.soft_cap)
    if slopes is None:
        return capped, capped, None
    if transposed:
        distance = rows.position[:, None, None, None, :] - columns.position[:, None, :, None, None]
        slope = slopes.reshape(1, raw.shape[1], 1, raw.shape[3], 1)
    else:
        distance = rows.position[:, None, None, :, None] - columns.position[:, None, None, None, :]
        slope = slopes.reshape(1, raw.shape[1], raw.shape[2], 1, 1)
    distance = distance.astype(jnp.float32)
    return capped - slope * distance, capped, distance


def _seen(mask: Mask, rows: _Tokens, columns: _Tokens) -> Any:
    """`[b or 1, L, T]`, or None where everything is visible."""
    if mask.everything and columns.valid is None:
        return None
    return visible(
        mask, rows.position, columns.position, rows.segment, columns.segment, columns.valid
    )


def _tile_forward(
    static: _Static, mask: Mask, q: Array, k: Array, v: Array, slopes: Any, rows: Any, columns: Any
) -> tuple[Array, Array, Array]:
    """Maximum and sum of `exp(logit - maximum)` `[b, k, g, L]`, and that sum over v, float32."""
    b, kv_heads, m, _ = q.shape
    L, T = rows.position.shape[1], columns.position.shape[1]
    raw = jnp.einsum("bkmh,bkth->bkmt", q, k, preferred_element_type=jnp.float32)
    raw = raw.reshape(b, kv_heads, m // L, L, T)
    logits, _, _ = _logits(static, raw, slopes, rows, columns, transposed=False)
    seen = _seen(mask, rows, columns)
    if seen is not None:
        logits = jnp.where(seen[:, None, None], logits, -jnp.inf)
    top = jnp.max(logits, axis=-1)
    weights = jnp.exp(logits - _finite(top)[..., None])
    total = jnp.sum(weights, axis=-1)
    flat = weights.reshape(b, kv_heads, m, T).astype(v.dtype)
    summed = jnp.einsum("bkmt,bkth->bkmh", flat, v, preferred_element_type=jnp.float32)
    return top, total, summed.reshape(b, kv_heads, m // L, L, v.shape[-1])


def _finite(top: Array) -> Array:
    return jnp.where(jnp.isneginf(top), 0.0, top)


def _tile_finish(top: Array, total: Array, summed: Array) -> tuple[Array, Array]:
    """Output and log-partition; 0 and -inf for rows that saw nothing."""
    empty = total == 0
    safe = jnp.where(empty, 1.0, total)
    return summed / safe[..., None], jnp.where(empty, -jnp.inf, jnp.log(safe) + top)


def _tile_backward(
    static: _Static, mask: Mask, query: Any, k: Array, v: Array, slopes: Any, columns: _Tokens
) -> tuple[Array, Array, Array, Any]:
    """Gradients of one tile: dq `[b, k, h, m]`, dk, dv `[b, k, T, h]`, dslopes `[k, g]`.

    Scores stand transposed, keys first: four of the five matmuls then have operands as they lie
    in memory, for which XLA's CPU matmul is fastest.
    """
    q, dout, lse, delta, rows = query
    b, kv_heads, m, _ = q.shape
    L, T = rows.position.shape[1], columns.position.shape[1]
    tall = (b, kv_heads, T, m // L, L)
    f32 = {"preferred_element_type": jnp.float32}
    raw = jnp.einsum("bkth,bkmh->bktm", k, q, **f32).reshape(tall)
    logits, capped, distance = _logits(static, raw, slopes, rows, columns, transposed=True)
    exponent = logits - lse.reshape(b, kv_heads, 1, m // L, L)
    seen = _seen(mask, rows, columns)
    if seen is not None:
        seen = jnp.swapaxes(seen, 1, 2)[:, None, :, None, :]
        exponent = jnp.where(seen, exponent, -jnp.inf)
    p = jnp.exp(exponent)
    dp = jnp.einsum("bkth,bkmh->bktm", v, dout, **f32).reshape(tall)
    ds = p * (dp - delta.reshape(b, kv_heads, 1, m // L, L))
    dslopes = None if slopes is None else -jnp.sum(ds * distance, axis=(0, 2, 4))
    if static.soft_cap is not None:
        ds = ds * (1 - jnp.square(capped / static.soft_cap))
    ds = (ds * static.scale).reshape(b, kv_heads, T, m).astype(q.dtype)
    p = p.reshape(b, kv_heads, T, m).astype(dout.dtype)
    dq = jnp.einsum("bkth,bktm->bkhm", k, ds, **f32)
    dk = jnp.einsum("bktm,bkmh->bkth", ds, q, **f32)
    dv = jnp.einsum("bktm,bkmh->bkth", p, dout, **f32)
    return dq, dk, dv, dslopes


def _fold(x: Array, kv_heads: int) -> Array:
    """`[b, L, n, h]` as `[b, k, g L, h]`."""
    b, L, n, h = x.shape
    grouped = x.reshape(b, L, kv_heads, n // kv_heads, h)
    return grouped.transpose(0, 2, 3, 1, 4).reshape(b, kv_heads, n // kv_heads * L, h)


def _fold_rows(x: Array, kv_heads: int) -> Array:
    """`[b, n, L]` as `[b, k, g L]`."""
    return x.reshape(x.shape[0], kv_heads, -1)


def _unfold(x: Array) -> Array:
    """`[b, k, g, L, h]` as `[b, L, n, h]`."""
    b, kv_heads, g, L, h = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(b, L, kv_heads * g, h)


def _unfold_transposed(x: Array, length: int) -> Array:
    """`[b, k, h, g L]` as `[b, L, n, h]`."""
    b, kv_heads, h, m = x.shape
    split = x.reshape(b, kv_heads, h, m // length, length)
    return split.transpose(0, 4, 1, 3, 2).reshape(b, length, -1, h)


def _describe(mask: Mask, s: int, t: int) -> tuple[_Tokens, _Tokens]:
    rows = _Tokens(position=positions(mask.q_positions, s), segment=mask.q_segments, valid=None)
    columns = _Tokens(
        position=positions(mask.kv_positions, t), segment=mask.kv_segments, valid=mask.kv_valid
    )
    return rows, columns


# ---- short sequences: a few query tiles, unrolled ------------------------------------------------


def _static_tiles(mask: Mask, s: int, t: int) -> list[tuple[int, int, int, int]]:
    """Per query tile its rows `[lo, hi)` and the keys `[first, last)` that any of them can see."""
    if not (mask.indexed and mask.ordered):
        return [(0, s, 0, t)]
    length = math.ceil(s / max(1, min(UNROLLED_TILES, s // SMALLEST_TILE)))
    tiles = []
    for lo in range(0, s, length):
        hi = min(lo + length, s)
        first = 0 if mask.left is None else min(max(0, lo - mask.left), t - 1)
        last = t if mask.right is None else min(t, hi + mask.right)
        tiles.append((lo, hi, first, max(first + 1, last)))
    return tiles


def _forward_unrolled(
    static: _Static, q: Array, k: Array, v: Array, slopes: Any, mask: Mask
) -> tuple[Array, Array]:
    s, t, kv_heads = q.shape[1], k.shape[1], k.shape[2]
    k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
    rows, columns = _describe(mask, s, t)
    outs, lses = [], []
    for lo, hi, first, last in _static_tiles(mask, s, t):
        partial = _tile_forward(
            static,
            mask,
            _fold(q[:, lo:hi], kv_heads),
            k[:, :, first:last],
            v[:, :, first:last],
            slopes,
            rows.slice(lo, hi),
            columns.slice(first, last),
        )
        out, lse = _tile_finish(*partial)
        outs.append(_unfold(out).astype(q.dtype))
        lses.append(lse.reshape(q.shape[0], q.shape[2], hi - lo))
    return jnp.concatenate(outs, axis=1), jnp.concatenate(lses, axis=2)


def _backward_unrolled(
    static: _Static,
    q: Array,
    k: Array,
    v: Array,
    slopes: Any,
    mask: Mask,
    dout: Array,
    lse: Array,
    delta: Array,
) -> tuple[Array, Array, Array, Any]:
    s, t, kv_heads = q.shape[1], k.shape[1], k.shape[2]
    k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
    rows, columns = _describe(mask, s, t)
    dqs, dks, dvs, dslopes = [], [], [], []
    for lo, hi, first, last in _static_tiles(mask, s, t):
        query = (
            _fold(q[:, lo:hi], kv_heads),
            _fold(dout[:, lo:hi], kv_heads),
            _fold_rows(lse[:, :, lo:hi], kv_heads),
            _fold_rows(delta[:, :, lo:hi], kv_heads),
            rows.slice(lo, hi),
        )
        keys = k[:, :, first:last], v[:, :, first:last]
        dq, dk, dv, dslope = _tile_backward(
            static, mask, query, *keys, slopes, columns.slice(first, last)
        )
        outside = [(0, 0), (0, 0), (first, t - last), (0, 0)]
        dqs.append(_unfold_transposed(dq, hi - lo))
        dks.append(jnp.pad(dk, outside))
        dvs.append(jnp.pad(dv, outside))
        dslopes.append(dslope)
    dk, dv = (jnp.swapaxes(sum(parts), 1, 2) for parts in (dks, dvs))
    return jnp.concatenate(dqs, axis=1), dk, dv, None if slopes is None else sum(dslopes)


# ---- long sequences: loops over tiles ------------------------------------------------------------


def _tiled(x: Array, axis: int, tile: int, **how: Any) -> Array:
    """`x` with `axis` cut into tiles, their number first; the last is filled up as `how` says."""
    missing = -x.shape[axis] % tile
    if missing:
        x = jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)], **how)
    cut = x.reshape(*x.shape[:axis], -1, tile, *x.shape[axis + 1 :])
    return jnp.moveaxis(cut, axis, 0)


def _tiles_of(mask: Mask, tile: int, s: int, t: int) -> tuple[_Tokens, _Tokens]:
    """The mask's rows and columns as stacks of tiles.

    Rows that fill the last tile have the last row's position and no segment; columns are invalid.
    """
    rows, columns = _describe(mask, s, t)
    valid = columns.valid
    if valid is None and t % tile:
        valid = jnp.ones((1, t), bool)

    def cut(tokens: _Tokens, valid: Any) -> _Tokens:
        segment = tokens.segment
        return _Tokens(
            position=_tiled(tokens.position, 1, tile, mode="edge"),
            segment=None if segment is None else _tiled(segment, 1, tile, constant_values=-1),
            valid=None if valid is None else _tiled(valid, 1, tile, constant_values=False),
        )

    return cut(rows, None), cut(columns, valid)


def _bounds(mask: Mask, rows: _Tokens, columns: _Tokens) -> tuple[Array, Array]:
    """Per query tile the key tiles `[first, last)` outside of which no row of it sees a key.

    Decided from the least and greatest position and segment of each tile, so it never leaves a
    visible key out, whatever the order of tokens; it is tight where they ascend.
    """
    q_low, q_high = (f(rows.position, axis=-1)[:, None] for f in (jnp.min, jnp.max))
    kv_low, kv_high = (f(columns.position, axis=-1)[None] for f in (jnp.min, jnp.max))
    possible = jnp.ones(jnp.broadcast_shapes(q_low.shape, kv_low.shape), bool)
    if mask.right is not None:
        possible &= kv_low <= q_high + mask.right
    if mask.left is not None:
        possible &= kv_high >= q_low - mask.left
    if mask.prefix is not None:
        possible |= kv_low < mask.prefix
    if rows.segment is not None:
        q_low, q_high = (x[:, None] for x in _segment_span(rows.segment))
        kv_low, kv_high = (x[None] for x in _segment_span(columns.segment))
        possible &= (kv_low <= q_high) & (kv_high >= q_low)
    if columns.valid is not None:
        possible &= jnp.any(columns.valid, axis=-1)[None]
    possible = jnp.any(possible, axis=-1)
    count = possible.shape[1]
    first = jnp.argmax(possible, axis=1)
    last = count - jnp.argmax(possible[:, ::-1], axis=1)
    return first, jnp.where(jnp.any(possible, axis=1), last, first)


def _segment_span(segment: Array) -> tuple[Array, Array]:
    """Least and greatest segment of each tile `[tiles, b]`, padding aside; empty: low > high."""
    above = jnp.where(segment < 0, np.iinfo(np.int32).max, segment)
    return jnp.min(above, axis=-1), jnp.max(jnp.maximum(segment, -1), axis=-1)


def _key_tiles(x: Array, tile: int) -> Array:
    """`[b, t, k, h]` as `[tiles, b, k, T, h]`."""
    return jnp.swapaxes(_tiled(x, 1, tile), 2, 3)


def _query_tiles(x: Array, kv_heads: int, tile: int) -> Array:
    """`[b, s, n, h]` as `[tiles, b, k, m, h]`."""
    tiles = _tiled(x, 1, tile)
    return jax.vmap(lambda tile: _fold(tile, kv_heads))(tiles)


def _forward_loop(
    static: _Static, q: Array, k: Array, v: Array, slopes: Any, mask: Mask
) -> tuple[Array, Array]:
    b, s, n, _ = q.shape
    t, kv_heads, tile = k.shape[1], k.shape[2], static.tile
    rows, columns = _tiles_of(mask, tile, s, t)
    keys = (_key_tiles(k, tile), _key_tiles(v, tile), columns)

    def over_queries(carry: None, xs: Any) -> tuple[None, Any]:
        query, row, first, last = xs

        def over_keys(j: Array, state: Any) -> Any:
            tile_k, tile_v, column = jax.tree.map(lambda x: x[j], keys)
            found = _tile_forward(static, mask, query, tile_k, tile_v, slopes, row, column)
            return _merge(state, found)

        shape = (b, kv_heads, n // kv_heads, tile)
        zeros = zeros_like_varying(shape, q)
        start = (zeros - jnp.inf, zeros, zeros_like_varying((*shape, v.shape[3]), q))
        out, lse = _tile_finish(*jax.lax.fori_loop(first, last, over_keys, start))
        return None, (_unfold(out).astype(q.dtype), lse.reshape(b, n, tile))

    xs = (_query_tiles(q, kv_heads, tile), rows, *_bounds(mask, rows, columns))
    _, (out, lse) = jax.lax.scan(over_queries, None, xs)
    out = jnp.moveaxis(out, 0, 1).reshape(b, -1, n, v.shape[3])[:, :s]
    return out, jnp.moveaxis(lse, 0, 2).reshape(b, n, -1)[:, :, :s]


def _add_at(total: Array, j: Array, more: Array) -> Array:
    """`total.at[j].add(more)` for a j known to be inside, which XLA then updates in place."""
    here = jax.lax.dynamic_index_in_dim(total, j, keepdims=False)
    return jax.lax.dynamic_update_index_in_dim(total, here + more, j, 0)


def _merge(one: Any, two: Any) -> Any:
    """Two partial softmaxes over disjoint keys as one."""
    top = jnp.maximum(one[0], two[0])
    by_one, by_two = (jnp.exp(x[0] - _finite(top)) for x in (one, two))
    total = one[1] * by_one + two[1] * by_two
    return top, total, one[2] * by_one[..., None] + two[2] * by_two[..., None]


def _backward_loop(
    static: _Static,
    q: Array,
    k: Array,
    v: Array,
    slopes: Any,
    mask: Mask,
    dout: Array,
    lse: Array,
    delta: Array,
) -> tuple[Array, Array, Array, Any]:
    b, s, n, h = q.shape
    t, kv_heads, tile = k.shape[1], k.shape[2], static.tile
    rows, columns = _tiles_of(mask, tile, s, t)
    keys = (_key_tiles(k, tile), _key_tiles(v, tile), columns)

    def over_queries(totals: Any, xs: Any) -> tuple[Any, Array]:
        *query, first, last = xs

        def over_keys(j: Array, carry: Any) -> Any:
            dq, dk, dv, dslopes = carry
            tile_k, tile_v, column = jax.tree.map(lambda x: x[j], keys)
            more = _tile_backward(static, mask, tuple(query), tile_k, tile_v, slopes, column)
            if slopes is not None:
                dslopes = dslopes + more[3]
            return dq + more[0], _add_at(dk, j, more[1]), _add_at(dv, j, more[2]), dslopes

        dq = zeros_like_varying((b, kv_heads, h, query[0].shape[2]), q)
        dq, *totals = jax.lax.fori_loop(first, last, over_keys, (dq, *totals))
        return tuple(totals), _unfold_transposed(dq, tile).astype(q.dtype)

    def row_tiles(x: Array) -> Array:
        tiles = _tiled(x, 2, tile)
        return tiles.reshape(tiles.shape[0], b, kv_heads, -1)

    xs = (
        _query_tiles(q, kv_heads, tile),
        _query_tiles(dout, kv_heads, tile),
        row_tiles(lse),
        row_tiles(delta),
        rows,
        *_bounds(mask, rows, columns),
    )
    start = (
        zeros_like_varying(keys[0].shape, q),
        zeros_like_varying(keys[1].shape, q),
        None if slopes is None else zeros_like_varying((kv_heads, n // kv_heads), q),
    )
    (dk, dv, dslopes), dq = jax.lax.scan(over_queries, start, xs)
    dq = jnp.moveaxis(dq, 0, 1).reshape(b, -1, n, h)[:, :s]

    def join(x: Array) -> Array:
        return x.transpose(1, 0, 3, 2, 4).reshape(b, -1, kv_heads, x.shape[-1])[:, :t]

    return dq, join(dk), join(dv), dslopes
