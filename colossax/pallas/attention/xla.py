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
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values
from jaxtyping import Array, Float

from colossax.pallas.attention.xla_layout import (
    TileRanges,
    bounds,
    describe,
    join,
    key_tiles,
    query_tiles,
    row_tiles,
    unfold,
    unfold_transposed,
)
from colossax.pallas.attention.xla_tile import (
    Tiles,
    Tokens,
    finite,
    tile_backward,
    tile_finish,
    tile_forward,
)
from colossax.pallas.target import Target, current_target
from colossax.pallas.varying import vary_alike, zeros_like_varying

from . import bias as pair_bias
from .mask import RANGES, Mask
from .merge import merge_blocks, row_delta, with_sinks
from .operands import Operands, Scoring
from .spec import AttentionSpec

TILE = {"cpu": 64}
"""Queries and keys of a tile by platform. On a CPU the scores of a tile should stay in its cache:
8 x 256 tokens, 4 / 2 heads of 64, float32, forward and backward in CPU time: 17 ms in tiles of 64,
26 of 128, 31 of 256; `jax.nn.dot_product_attention` takes 39."""


OTHER_TILE = 512


def why_not(spec: AttentionSpec, target: Target) -> str | None:
    """It takes everything everywhere."""
    return None


def attend(
    operands: Operands, scoring: Scoring
) -> tuple[Float[Array, "b s n hv"], Float[Array, "b n s"]]:
    """Attention and its log-partition, see `api.attention`.

    Cost: 4 s t n h FLOPs a row forward, 10 backward, less what the mask leaves out by whole tiles;
    residuals are the inputs, the output and 4 bytes per query and head; the scores of one tile are
    alive at a time. A bias is read once per visible tile in each pass; its gradient takes the
    bias's size in float32, summed over what shares an item, and nothing where nobody asks for it;
    a length that its tiles do not divide costs a copy of the bias, filled up.
    tests/pallas/attention/test_xla.py and test_bias.py count the memory.
    """
    out, lse = _attend(tiles_of(operands), *vary_alike((operands, scoring.without_sinks)))
    return (out, lse) if scoring.sinks is None else with_sinks(out, lse, scoring.sinks)


def attend_block(
    operands: Operands,
    scoring: Scoring,
    *,
    carried: tuple[Float[Array, "b s n hv"], Float[Array, "b n s"]] | None = None,
) -> tuple[Float[Array, "b s n hv"], Float[Array, "b n s"]]:
    """See `block.forward_block`."""
    given = vary_alike((operands, scoring.without_sinks))
    outputs = _forward(tiles_of(operands), *given, dtype=jnp.float32)
    return outputs if carried is None else merge_blocks(*carried, *outputs)


def block_gradients(
    operands: Operands,
    scoring: Scoring,
    *,
    dout: Float[Array, "b s n hv"],
    lse: Float[Array, "b n s"],
    delta: Float[Array, "b n s"],
) -> tuple[Operands, Scoring]:
    """See `block.backward_block`."""
    given = vary_alike((operands, scoring.without_sinks, dout, lse, delta))
    asked = (True,) * len(scoring.biases)
    gradients = _backward(tiles_of(operands), *given, asked=asked, dtype=jnp.float32)
    dq, dk, dv, dslopes, dbiases = gradients
    if dslopes is not None:
        dslopes = dslopes.reshape(scoring.alibi_slopes.shape)
    of_scoring = scoring.replace(alibi_slopes=dslopes, biases=tuple(dbiases), dropout=None)
    return Operands(q=dq, k=dk, v=dv, mask=None), of_scoring


def ranges_of(mask: Mask, spec: AttentionSpec) -> TileRanges:
    """What `attend` reads of the mask, see `api.with_ranges`."""
    lengths = spec.q_length, spec.kv_length
    return _ranges(_tiles(*lengths), mask, lengths)


def _ranges(tiles: Tiles, mask: Mask, lengths: tuple[int, int]) -> TileRanges:
    """Those that the mask carries, if they are of these lengths in these tiles."""
    carried = mask.ranges
    if isinstance(carried, TileRanges) and (carried.tiles, carried.lengths) == (tiles, lengths):
        return carried
    with jax.named_scope(RANGES):
        rows, columns = describe(tiles, mask, *lengths)
        limits = bounds(mask, rows, columns)
    return TileRanges(rows=rows, columns=columns, bounds=limits, tiles=tiles, lengths=lengths)


def tiles_of(operands: Operands) -> Tiles:
    """Of these lengths on the platform of the target."""
    return _tiles(*operands.lengths)


def _tiles(s: int, t: int) -> Tiles:
    q_tile, kv_tile = _tile_sizes(s, t)
    return Tiles(q_tile=q_tile, kv_tile=kv_tile)


def _tile_sizes(s: int, t: int) -> tuple[int, int]:
    """Equal tiles of about the platform's size; wider in keys where queries are few."""
    size = TILE.get(current_target().platform, OTHER_TILE)
    q_tile = math.ceil(s / math.ceil(s / size))
    size = max(size, size**2 // q_tile)
    return q_tile, math.ceil(t / math.ceil(t / size))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(tiles: Tiles, operands: Operands, scoring: Scoring) -> Any:
    return _forward(tiles, operands, scoring, dtype=operands.q.dtype)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Asked:
    """Whether somebody wants the gradient of each bias; among residuals, a bool is an array."""

    biases: tuple[bool, ...]


def _attend_fwd(tiles: Tiles, operands: Operands, scoring: Scoring) -> Any:
    asked = _Asked(tuple(map(_perturbed, scoring.biases)))
    operands, scoring = custom_vjp_primal_tree_values((operands, scoring))
    # Named here, not by the caller: a remat policy that keeps the output must keep lse with it, or
    # the whole forward pass runs again for lse alone.
    outputs = _forward(tiles, operands, scoring, dtype=operands.q.dtype)
    out, lse = (checkpoint_name(x, "attention") for x in outputs)
    return (out, lse), (operands, scoring, asked, out, lse)


def _perturbed(bias: Any) -> bool:
    """Whether any part of a bias marked as `symbolic_zeros` does is differentiated."""
    parts = jax.tree.leaves(bias, is_leaf=lambda x: hasattr(x, "perturbed"))
    return any(x.perturbed for x in parts)


def _attend_bwd(tiles: Tiles, saved: Any, cotangents: Any) -> Any:
    operands, scoring, asked, out, lse = saved
    dout, dlse = map(_instantiated, cotangents, (out, lse))
    delta = row_delta(out, lse, dout, dlse)
    given = (tiles, operands, scoring, dout, lse, delta)
    dq, dk, dv, dslopes, dbiases = _backward(*given, asked=asked.biases, dtype=operands.q.dtype)
    if dslopes is not None:
        dslopes = dslopes.reshape(scoring.alibi_slopes.shape)
    dbiases = tuple(
        None if total is None else pair_bias.cut_back(total, bias)
        for total, bias in zip(dbiases, scoring.biases, strict=True)
    )
    of_scoring = scoring.replace(alibi_slopes=dslopes, biases=dbiases, dropout=None)
    return operands.gradients(dq, dk, dv), of_scoring


# With symbolic zeros, to know which biases are constant: XLA drops nothing from nested loops.
_attend.defvjp(_attend_fwd, _attend_bwd, symbolic_zeros=True)


def _instantiated(cotangent: Any, like: Array) -> Array:
    if isinstance(cotangent, SymbolicZero):
        return zeros_like_varying(like.shape, like).astype(like.dtype)
    return cotangent


def _forward(
    tiles: Tiles, operands: Operands, scoring: Scoring, *, dtype: Any
) -> tuple[Array, Array]:
    """Output in `dtype`, which is rounded to tile by tile, and the log-partition."""
    q, k, v, mask = operands.q, operands.k, operands.v, operands.masked
    b, s, n, _ = q.shape
    kv_heads, length = k.shape[2], tiles.q_tile
    ranges = _ranges(tiles, mask, operands.lengths)
    keys = (key_tiles(k, tiles.kv_tile), key_tiles(v, tiles.kv_tile), ranges.columns)
    shape = (b, kv_heads, n // kv_heads, length)
    biases = [pair_bias.fill_up(x, length, tiles.kv_tile) for x in scoring.biases]

    def over_queries(_: None, xs: Any) -> tuple[None, Any]:
        i, query, row, bounds = xs

        def over_keys(j: Array, state: Any) -> Any:
            tile_k, tile_v, column = _at(keys, j)
            place = _place(tiles, i, j, row, column)
            added = tuple(pair_bias.read(x, place, kv_heads, transposed=False) for x in biases)
            tile = Operands(q=query, k=tile_k, v=tile_v, mask=mask)
            return _merge(state, tile_forward(tile, scoring.replace(biases=added), row, column))

        zeros = zeros_like_varying(shape, q)
        start = (zeros - jnp.inf, zeros, zeros_like_varying((*shape, v.shape[3]), q))
        first, last = bounds or (0, len(keys[0]))
        out, lse = tile_finish(*jax.lax.fori_loop(first, last, over_keys, start))
        return None, (unfold(out).astype(dtype), lse.reshape(b, n, length))

    queries = query_tiles(q, kv_heads, length)
    xs = (_numbers(queries), queries, ranges.rows, ranges.bounds)
    _, (out, lse) = jax.lax.scan(over_queries, None, xs)
    return join(out, 1, s), join(lse, 2, s)


def _place(tiles: Tiles, i: Array, j: Array, row: Tokens, column: Tokens) -> pair_bias.Place:
    """Of the i-th tile of queries and the j-th of keys."""
    return pair_bias.Place(
        i=i,
        j=j,
        q_tile=tiles.q_tile,
        kv_tile=tiles.kv_tile,
        q_position=row.position,
        kv_position=column.position,
    )


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
    by_one, by_two = (jnp.exp(x[0] - finite(top)) for x in (one, two))
    total = one[1] * by_one + two[1] * by_two
    return top, total, one[2] * by_one[..., None] + two[2] * by_two[..., None]


def _backward(
    tiles: Tiles,
    operands: Operands,
    scoring: Scoring,
    dout: Array,
    lse: Array,
    delta: Array,
    *,
    asked: Sequence[bool],
    dtype: Any,
) -> tuple[Array, Array, Array, Any, Any]:
    """dq in `dtype`; float32 dk, dv, dslopes `[k, g]` or None, and filled up per bias asked for."""
    q, k, v, mask = operands.q, operands.k, operands.v, operands.masked
    b, s, n, h = q.shape
    t, kv_heads, length = k.shape[1], k.shape[2], tiles.q_tile
    ranges = _ranges(tiles, mask, operands.lengths)
    keys = (key_tiles(k, tiles.kv_tile), key_tiles(v, tiles.kv_tile), ranges.columns)
    filled = [pair_bias.fill_up(x, length, tiles.kv_tile) for x in scoring.biases]

    def over_queries(totals: Any, xs: Any) -> tuple[Any, Array]:
        i, query, *of_rows, row, bounds = xs

        def over_keys(j: Array, carry: Any) -> Any:
            dq, dk, dv, dslopes, dbiases = carry
            tile_k, tile_v, column = _at(keys, j)
            place = _place(tiles, i, j, row, column)
            added = tuple(pair_bias.read(x, place, kv_heads, transposed=True) for x in filled)
            tile = Operands(q=query, k=tile_k, v=tile_v, mask=mask)
            here = scoring.replace(biases=added)
            more = tile_backward(tile, here, row, column, *of_rows)
            dq, dk, dv = dq + more[0], _add_at(dk, j, more[1]), _add_at(dv, j, more[2])
            if dslopes is not None:
                dslopes = dslopes + more[3]
            dbiases = [
                None if total is None else pair_bias.add(total, bias, place, more[4])
                for total, bias in zip(dbiases, filled, strict=True)
            ]
            return dq, dk, dv, dslopes, dbiases

        dq = zeros_like_varying((b, kv_heads, h, n // kv_heads * length), q)
        first, last = bounds or (0, len(keys[0]))
        dq, *totals = jax.lax.fori_loop(first, last, over_keys, (dq, *totals))
        return tuple(totals), unfold_transposed(dq, length).astype(dtype)

    # Probabilities are 0 in rows that see nothing, be it by -inf in a bias, and in rows that fill
    # up: a logit less +inf. Less -inf or 0 it might be NaN or overflow.
    lse = jnp.where(jnp.isneginf(lse), jnp.inf, lse)
    queries = query_tiles(q, kv_heads, length)
    xs = (
        _numbers(queries),
        queries,
        query_tiles(dout, kv_heads, length),
        row_tiles(lse, kv_heads, length, constant_values=jnp.inf),
        row_tiles(delta, kv_heads, length),
        ranges.rows,
        ranges.bounds,
    )
    start = (
        zeros_like_varying(keys[0].shape, q),
        zeros_like_varying(keys[1].shape, q),
        None if scoring.alibi_slopes is None else zeros_like_varying((kv_heads, n // kv_heads), q),
        [pair_bias.zeros(x, q) if a else None for x, a in zip(filled, asked, strict=True)],
    )
    (dk, dv, dslopes, dbiases), dq = jax.lax.scan(over_queries, start, xs)
    dk, dv = (join(jnp.swapaxes(x, 2, 3), 1, t) for x in (dk, dv))
    return join(dq, 1, s), dk, dv, dslopes, dbiases
