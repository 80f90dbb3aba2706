"""Blockwise attention in plain XLA: memory grows with the sequence, not with its square.

The forward pass keeps the output and the log-partition; the backward pass computes every block of
probabilities again from them. Query heads of one kv head are rows of one matrix, so nothing is
repeated. Shapes inside: b batch, k kv heads, g query heads per kv head, L queries and T keys of a
tile, m = g L rows.

Both passes loop over query tiles and, inside, over the key tiles from the first to the last that
any row of the query tile can see. Where the mask hides nothing the compiler knows how often.
Biases are read tile by tile, and their gradients added up at their own shape (`bias.py`).
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values
from jaxtyping import Array, Float

from colossax.pallas.target import Target, current_target
from colossax.pallas.varying import vary_alike, zeros_like_varying

from . import bias as pair_bias
from .mask import Mask, positions, visible
from .merge import merge_blocks, row_delta, with_sinks
from .spec import AttentionSpec

TILE = {"cpu": 64}
"""Queries and keys of a tile by platform. On a CPU the scores of a tile should stay in its cache:
8 x 256 tokens, 4 / 2 heads of 64, float32, forward and backward in CPU time: 17 ms in tiles of 64,
26 of 128, 31 of 256; `jax.nn.dot_product_attention` takes 39."""

OTHER_TILE = 512


def why_not(spec: AttentionSpec, target: Target) -> str | None:
    """It takes everything everywhere."""
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Static:
    """What a trace depends on."""

    scale: float
    soft_cap: float | None
    q_tile: int
    kv_tile: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tokens:
    """What the mask says of some queries or keys: `[b or 1, length]` each."""

    position: Any
    segment: Any
    valid: Any


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
    residuals are the inputs, the output and 4 bytes per query and head; the scores of one tile are
    alive at a time. A bias is read once per visible tile in each pass; its gradient takes the
    bias's size in float32, summed over what shares an item, and nothing where nobody asks for it;
    a length that its tiles do not divide costs a copy of the bias, filled up.
    tests/pallas/attention/test_xla.py and test_bias.py count the memory.
    """
    operands = _operands((q, k, v), alibi_slopes, tuple(biases), mask)
    out, lse = _attend(_static(q, k, scale, soft_cap), *operands)
    return (out, lse) if sinks is None else with_sinks(out, lse, sinks)


def attend_block(
    q: Float[Array, "b s n h"],
    k: Float[Array, "b t k h"],
    v: Float[Array, "b t k hv"],
    *,
    mask: Mask,
    alibi_slopes: Float[Array, " n"] | None,
    scale: float,
    soft_cap: float | None,
    carried: tuple[Float[Array, "b s n hv"], Float[Array, "b n s"]] | None = None,
) -> tuple[Float[Array, "b s n hv"], Float[Array, "b n s"]]:
    """See `block.attend_block`."""
    operands = _operands((q, k, v), alibi_slopes, (), mask)
    found = _forward(_static(q, k, scale, soft_cap), *operands, dtype=jnp.float32)
    return found if carried is None else merge_blocks(*carried, *found)


def block_gradients(
    q: Float[Array, "b s n h"],
    k: Float[Array, "b t k h"],
    v: Float[Array, "b t k hv"],
    *,
    mask: Mask,
    alibi_slopes: Float[Array, " n"] | None,
    scale: float,
    soft_cap: float | None,
    dout: Float[Array, "b s n hv"],
    lse: Float[Array, "b n s"],
    delta: Float[Array, "b n s"],
) -> tuple[Array, Array, Array, Any]:
    """See `block.block_gradients`."""
    operands = _operands((q, k, v), alibi_slopes, (), mask, dout, lse, delta)
    static = _static(q, k, scale, soft_cap)
    dq, dk, dv, dslopes, _ = _backward(static, *operands, asked=(), dtype=jnp.float32)
    return dq, dk, dv, None if dslopes is None else dslopes.reshape(q.shape[2])


def _operands(qkv: tuple[Array, ...], slopes: Any, biases: Any, mask: Mask, *others: Array) -> Any:
    slopes = None if slopes is None else slopes.astype(jnp.float32)
    return vary_alike((*qkv, slopes, biases, mask, *others))


def _static(q: Array, k: Array, scale: float, soft_cap: float | None) -> _Static:
    q_tile, kv_tile = _tile_sizes(q.shape[1], k.shape[1])
    return _Static(scale=scale, soft_cap=soft_cap, q_tile=q_tile, kv_tile=kv_tile)


def _tile_sizes(s: int, t: int) -> tuple[int, int]:
    """Equal tiles of about the platform's size; wider in keys where queries are few."""
    size = TILE.get(current_target().platform, OTHER_TILE)
    q_tile = math.ceil(s / math.ceil(s / size))
    size = max(size, size**2 // q_tile)
    return q_tile, math.ceil(t / math.ceil(t / size))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: _Static, q: Any, k: Any, v: Any, slopes: Any, biases: Any, mask: Mask) -> Any:
    return _forward(static, q, k, v, slopes, biases, mask, dtype=q.dtype)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Asked:
    """Whether somebody wants the gradient of each bias; among residuals, a bool is an array."""

    biases: tuple[bool, ...]


def _attend_fwd(static: _Static, *marked: Any) -> Any:
    asked = _Asked(tuple(x.perturbed for x in marked[4]))
    operands = custom_vjp_primal_tree_values(marked)
    # Named here, not by the caller: a remat policy that keeps the output must keep lse with it, or
    # the whole forward pass runs again for lse alone.
    found = _forward(static, *operands, dtype=operands[0].dtype)
    out, lse = (checkpoint_name(x, "attention") for x in found)
    return (out, lse), (operands, asked, out, lse)


def _attend_bwd(static: _Static, saved: Any, cotangents: Any) -> Any:
    operands, asked, out, lse = saved
    q, k, v, slopes, biases, mask = operands
    dout, dlse = map(_instantiated, cotangents, (out, lse))
    delta = row_delta(out, lse, dout, dlse)
    dq, dk, dv, dslopes, dbiases = _backward(
        static,
        q,
        k,
        v,
        slopes,
        biases,
        mask,
        dout,
        lse,
        delta,
        asked=asked.biases,
        dtype=q.dtype,
    )
    if slopes is not None:
        dslopes = dslopes.reshape(slopes.shape)
    dbiases = (
        None if total is None else pair_bias.cut_back(total, bias)
        for total, bias in zip(dbiases, biases, strict=True)
    )
    return dq, dk.astype(k.dtype), dv.astype(v.dtype), dslopes, tuple(dbiases), None


def _instantiated(cotangent: Any, like: Array) -> Array:
    if isinstance(cotangent, SymbolicZero):
        return zeros_like_varying(like.shape, like).astype(like.dtype)
    return cotangent


# With symbolic zeros, to know which biases are constant: XLA drops nothing from nested loops.
_attend.defvjp(_attend_fwd, _attend_bwd, symbolic_zeros=True)


# ---- one tile ------------------------------------------------------------------------------------


def _logits(
    static: _Static,
    raw: Array,
    slopes: Any,
    biases: Sequence[Array],
    rows: _Tokens,
    columns: _Tokens,
    transposed: bool,
) -> tuple[Array, Array, Any]:
    """Scores `[b, k, g, L, T]` (transposed: `[b, k, T, g, L]`): final, capped, and distances."""
    capped = raw * static.scale
    if static.soft_cap is not None:
        capped = static.soft_cap * jnp.tanh(capped / static.soft_cap)
    logits = sum(biases, start=capped)
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


def _seen(mask: Mask, rows: _Tokens, columns: _Tokens) -> Any:
    """`[b or 1, L, T]`, or None where everything is visible."""
    if mask.everything and columns.valid is None:
        return None
    return visible(
        mask, rows.position, columns.position, rows.segment, columns.segment, columns.valid
    )


def _tile_forward(
    static: _Static,
    mask: Mask,
    q: Array,
    k: Array,
    v: Array,
    slopes: Any,
    biases: Sequence[Array],
    rows: _Tokens,
    columns: _Tokens,
) -> tuple[Array, Array, Array]:
    """Maximum and sum of `exp(logit - maximum)` `[b, k, g, L]`, and that sum over v, float32."""
    b, kv_heads, m, _ = q.shape
    L, T = rows.position.shape[1], columns.position.shape[1]
    raw = jnp.einsum("bkmh,bkth->bkmt", q, k, preferred_element_type=jnp.float32)
    raw = raw.reshape(b, kv_heads, m // L, L, T)
    logits, _, _ = _logits(static, raw, slopes, biases, rows, columns, transposed=False)
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
    static: _Static,
    mask: Mask,
    query: Any,
    k: Array,
    v: Array,
    slopes: Any,
    biases: Sequence[Array],
    columns: _Tokens,
) -> tuple[Array, Array, Array, Any, Array]:
    """Gradients of one tile: dq `[b, k, h, m]`, dk, dv `[b, k, T, h]`, dslopes `[k, g]`, dlogits.

    The last is `[b, k, T, g, L]`, that of the final logits. Scores stand transposed, keys first:
    four of the five matmuls then have operands as they lie in memory, for which XLA's CPU matmul
    is fastest.
    """
    q, dout, lse, delta, rows = query
    b, kv_heads, m, _ = q.shape
    L, T = rows.position.shape[1], columns.position.shape[1]
    tall = (b, kv_heads, T, m // L, L)
    f32 = {"preferred_element_type": jnp.float32}
    raw = jnp.einsum("bkth,bkmh->bktm", k, q, **f32).reshape(tall)
    logits, capped, distance = _logits(static, raw, slopes, biases, rows, columns, transposed=True)
    exponent = logits - lse.reshape(b, kv_heads, 1, m // L, L)
    seen = _seen(mask, rows, columns)
    if seen is not None:
        seen = jnp.swapaxes(seen, 1, 2)[:, None, :, None, :]
        exponent = jnp.where(seen, exponent, -jnp.inf)
    p = jnp.exp(exponent)
    dp = jnp.einsum("bkth,bkmh->bktm", v, dout, **f32).reshape(tall)
    ds = p * (dp - delta.reshape(b, kv_heads, 1, m // L, L))
    dlogits = ds
    dslopes = None if slopes is None else -jnp.sum(ds * distance, axis=(0, 2, 4))
    if static.soft_cap is not None:
        ds = ds * (1 - jnp.square(capped / static.soft_cap))
    ds = (ds * static.scale).reshape(b, kv_heads, T, m).astype(q.dtype)
    p = p.reshape(b, kv_heads, T, m).astype(dout.dtype)
    dq = jnp.einsum("bkth,bktm->bkhm", k, ds, **f32)
    dk = jnp.einsum("bktm,bkmh->bkth", ds, q, **f32)
    dv = jnp.einsum("bktm,bkmh->bkth", p, dout, **f32)
    return dq, dk, dv, dslopes, dlogits


def _fold(x: Array, kv_heads: int) -> Array:
    """`[b, L, n, h]` as `[b, k, g L, h]`."""
    b, L, n, h = x.shape
    grouped = x.reshape(b, L, kv_heads, n // kv_heads, h)
    return grouped.transpose(0, 2, 3, 1, 4).reshape(b, kv_heads, n // kv_heads * L, h)


def _unfold(x: Array) -> Array:
    """`[b, k, g, L, h]` as `[b, L, n, h]`."""
    b, kv_heads, g, L, h = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(b, L, kv_heads * g, h)


def _unfold_transposed(x: Array, length: int) -> Array:
    """`[b, k, h, g L]` as `[b, L, n, h]`."""
    b, kv_heads, h, m = x.shape
    split = x.reshape(b, kv_heads, h, m // length, length)
    return split.transpose(0, 4, 1, 3, 2).reshape(b, length, -1, h)


# ---- loops over tiles ----------------------------------------------------------------------------


def _tiled(x: Array, axis: int, tile: int, **how: Any) -> Array:
    """`x` with `axis` cut into tiles, their number first; the last is filled up as `how` says."""
    missing = -x.shape[axis] % tile
    if missing:
        x = jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)], **how)
    cut = x.reshape(*x.shape[:axis], -1, tile, *x.shape[axis + 1 :])
    return jnp.moveaxis(cut, axis, 0)


def _key_tiles(x: Array, tile: int) -> Array:
    """`[b, t, k, h]` as `[tiles, b, k, T, h]`."""
    return jnp.swapaxes(_tiled(x, 1, tile), 2, 3)


def _query_tiles(x: Array, kv_heads: int, tile: int) -> Array:
    """`[b, s, n, h]` as `[tiles, b, k, m, h]`."""
    return jax.vmap(functools.partial(_fold, kv_heads=kv_heads))(_tiled(x, 1, tile))


def _row_tiles(x: Array, kv_heads: int, tile: int, **how: Any) -> Array:
    """`[b, n, s]` as `[tiles, b, k, m]`."""
    tiles = _tiled(x, 2, tile, **how)
    return tiles.reshape(*tiles.shape[:2], kv_heads, -1)


def _join(tiles: Array, axis: int, length: int) -> Array:
    """Undoes `_tiled`."""
    x = jnp.moveaxis(tiles, 0, axis)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return jax.lax.slice_in_dim(x, 0, length, axis=axis)


def _describe(static: _Static, mask: Mask, s: int, t: int) -> tuple[_Tokens, _Tokens]:
    """The mask's rows and columns, tile by tile.

    Rows that fill the last tile have the last row's position and no segment; columns are invalid.
    """

    def cut(tile: int, position: Array, segment: Any, valid: Any) -> _Tokens:
        return _Tokens(
            position=_tiled(position, 1, tile, mode="edge"),
            segment=None if segment is None else _tiled(segment, 1, tile, constant_values=-1),
            valid=None if valid is None else _tiled(valid, 1, tile, constant_values=False),
        )

    valid = mask.kv_valid
    if valid is None and t % static.kv_tile:
        valid = jnp.ones((1, t), bool)
    return (
        cut(static.q_tile, positions(mask.q_positions, s), mask.q_segments, None),
        cut(static.kv_tile, positions(mask.kv_positions, t), mask.kv_segments, valid),
    )


def _bounds(mask: Mask, rows: _Tokens, columns: _Tokens) -> tuple[Array, Array] | None:
    """Per query tile the key tiles `[first, last)` outside of which no row of it sees a key.

    None for all of them, a number that the compiler knows, where the mask hides nothing. Decided
    from the least and greatest position and segment of each tile, so it never leaves a visible key
    out, whatever the order of tokens; it is tight where they ascend.
    """
    if mask.everything:
        return None
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
    count = possible.shape[1]
    tiles = jnp.arange(count, dtype=jnp.int32)[:, None]
    first = jnp.min(jnp.where(possible, tiles, count), axis=(1, 2))
    return first, jnp.max(jnp.where(possible, tiles + 1, 0), axis=(1, 2))


def _segment_span(segment: Array) -> tuple[Array, Array]:
    """Least and greatest segment of each tile `[tiles, b]`, padding aside; empty: low > high."""
    above = jnp.where(segment < 0, np.iinfo(np.int32).max, segment)
    return jnp.min(above, axis=-1), jnp.max(jnp.maximum(segment, -1), axis=-1)


def _forward(
    static: _Static,
    q: Array,
    k: Array,
    v: Array,
    slopes: Any,
    biases: Sequence[Array],
    mask: Mask,
    *,
    dtype: Any,
) -> tuple[Array, Array]:
    """Output in `dtype`, which is rounded to tile by tile, and the log-partition."""
    b, s, n, _ = q.shape
    kv_heads, length = k.shape[2], static.q_tile
    rows, columns = _describe(static, mask, s, k.shape[1])
    keys = (_key_tiles(k, static.kv_tile), _key_tiles(v, static.kv_tile), columns)
    shape = (b, kv_heads, n // kv_heads, length)
    biases = [pair_bias.fill_up(x, length, static.kv_tile) for x in biases]

    def over_queries(_: None, xs: Any) -> tuple[None, Any]:
        i, query, row, bounds = xs

        def over_keys(j: Array, state: Any) -> Any:
            tile_k, tile_v, column = _at(keys, j)
            place = pair_bias.Place(i=i, j=j, q_tile=length, kv_tile=static.kv_tile)
            added = [pair_bias.read(x, place, kv_heads, transposed=False) for x in biases]
            found = _tile_forward(static, mask, query, tile_k, tile_v, slopes, added, row, column)
            return _merge(state, found)

        zeros = zeros_like_varying(shape, q)
        start = (zeros - jnp.inf, zeros, zeros_like_varying((*shape, v.shape[3]), q))
        first, last = bounds or (0, len(keys[0]))
        out, lse = _tile_finish(*jax.lax.fori_loop(first, last, over_keys, start))
        return None, (_unfold(out).astype(dtype), lse.reshape(b, n, length))

    queries = _query_tiles(q, kv_heads, length)
    xs = (_numbers(queries), queries, rows, _bounds(mask, rows, columns))
    _, (out, lse) = jax.lax.scan(over_queries, None, xs)
    return _join(out, 1, s), _join(lse, 2, s)


def _numbers(tiles: Array) -> Array:
    return jnp.arange(len(tiles), dtype=jnp.int32)


def _at(tree: Any, j: Array) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, j, keepdims=False), tree)


def _add_at(total: Array, j: Array, more: Array) -> Array:
    """`total.at[j].add(more)` for a j known to be inside: XLA updates it in place."""
    return jax.lax.dynamic_update_index_in_dim(total, _at(total, j) + more, j, 0)


def _merge(one: Any, two: Any) -> Any:
    """Two partial softmaxes over disjoint keys as one."""
    top = jnp.maximum(one[0], two[0])
    by_one, by_two = (jnp.exp(x[0] - _finite(top)) for x in (one, two))
    total = one[1] * by_one + two[1] * by_two
    return top, total, one[2] * by_one[..., None] + two[2] * by_two[..., None]


def _backward(
    static: _Static,
    q: Array,
    k: Array,
    v: Array,
    slopes: Any,
    biases: Sequence[Array],
    mask: Mask,
    dout: Array,
    lse: Array,
    delta: Array,
    *,
    asked: Sequence[bool],
    dtype: Any,
) -> tuple[Array, Array, Array, Any, Any]:
    """dq in `dtype`; float32 dk, dv, dslopes `[k, g]` or None, and filled up per bias asked for."""
    b, s, n, h = q.shape
    t, kv_heads, length = k.shape[1], k.shape[2], static.q_tile
    rows, columns = _describe(static, mask, s, t)
    keys = (_key_tiles(k, static.kv_tile), _key_tiles(v, static.kv_tile), columns)
    filled = [pair_bias.fill_up(x, length, static.kv_tile) for x in biases]

    def over_queries(totals: Any, xs: Any) -> tuple[Any, Array]:
        i, *query, bounds = xs

        def over_keys(j: Array, carry: Any) -> Any:
            dq, dk, dv, dslopes, dbiases = carry
            tile_k, tile_v, column = _at(keys, j)
            place = pair_bias.Place(i=i, j=j, q_tile=length, kv_tile=static.kv_tile)
            added = [pair_bias.read(x, place, kv_heads, transposed=True) for x in filled]
            more = _tile_backward(static, mask, tuple(query), tile_k, tile_v, slopes, added, column)
            dq, dk, dv = dq + more[0], _add_at(dk, j, more[1]), _add_at(dv, j, more[2])
            if slopes is not None:
                dslopes = dslopes + more[3]
            dbiases = jax.tree.map(lambda x: pair_bias.add(x, place, more[4]), dbiases)
            return dq, dk, dv, dslopes, dbiases

        dq = zeros_like_varying((b, kv_heads, h, n // kv_heads * length), q)
        first, last = bounds or (0, len(keys[0]))
        dq, *totals = jax.lax.fori_loop(first, last, over_keys, (dq, *totals))
        return tuple(totals), _unfold_transposed(dq, length).astype(dtype)

    # Probabilities are 0 in rows that see nothing, be it by -inf in a bias, and in rows that fill
    # up: a logit less +inf. Less -inf or 0 it might be NaN or overflow.
    lse = jnp.where(jnp.isneginf(lse), jnp.inf, lse)
    queries = _query_tiles(q, kv_heads, length)
    xs = (
        _numbers(queries),
        queries,
        _query_tiles(dout, kv_heads, length),
        _row_tiles(lse, kv_heads, length, constant_values=jnp.inf),
        _row_tiles(delta, kv_heads, length),
        rows,
        _bounds(mask, rows, columns),
    )
    start = (
        zeros_like_varying(keys[0].shape, q),
        zeros_like_varying(keys[1].shape, q),
        None if slopes is None else zeros_like_varying((kv_heads, n // kv_heads), q),
        [zeros_like_varying(x.shape, q) if a else None for x, a in zip(filled, asked, strict=True)],
    )
    (dk, dv, dslopes, dbiases), dq = jax.lax.scan(over_queries, start, xs)
    dk, dv = (_join(jnp.swapaxes(x, 2, 3), 1, t) for x in (dk, dv))
    return _join(dq, 1, s), dk, dv, dslopes, dbiases
