"""Gradients of attention's keys and values, a Mosaic kernel over tiles of keys."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from colossax.pallas.attention.tiles import visits_of_keys, visits_of_queries
from colossax.pallas.mosaic import (
    WARPGROUP_ROWS,
    Stages,
    launch,
    matrix,
    spread,
    stage_barriers,
    vector,
)

from .backward_operands import (
    COPY_REGISTERS,
    Operands,
    Walk,
    compute_registers,
    place,
    pull_back,
    store,
    weigh,
)
from .backward_tiles import KeyTiles


def key_gradients(operands: Operands, tiles: KeyTiles) -> tuple[jax.Array, jax.Array]:
    """`dk = scale ds^T q` and `dv = p^T dout`, `[b t k h]` and `[b t k hv]`.

    A block of `tiles.keys` keys of one kv head visits the queries that see them, of all query
    heads of its group, and sums in float32: nothing is left to add. Scores are transposed, keys
    along rows, so that `p^T` and `ds^T` are in registers as the tensor cores take them.

    Cost: 4 matmuls, 4 (h + hv) FLOPs per query, key and head in the tiles visited (`apart`: the
    scores once more); reads q and dout once per block and head, k and v once.
    """
    b, t, kv_heads, _ = operands.k.shape
    lo, hi = operands.ranges[:, 0], operands.ranges[:, 1]
    of_queries = visits_of_queries(lo, hi, tiles.queries, tiles.keys)
    visits = visits_of_keys(of_queries, t // tiles.keys).packed
    biases = tuple(x.swapaxes(-1, -2) for x in operands.biases)
    run = launch(
        functools.partial(_body, operands, tiles),
        out=tuple(jax.ShapeDtypeStruct(x.shape, operands.dtype) for x in (operands.k, operands.v)),
        scratch=[_scratch(operands, tiles)],
        # Under a causal mask the first tiles have most to do, and start first.
        grid={"batch": b, "kv_heads": kv_heads, "tiles": t // tiles.keys},
        warpgroups=tiles.warpgroups + 1,
        interpret=operands.interpret,
    )
    return run(*operands.arrays, visits, *biases)


def _scratch(operands: Operands, tiles: KeyTiles) -> dict[str, Any]:
    h, hv, dtype = operands.q.shape[-1], operands.v.shape[-1], operands.q.dtype
    parts = tiles.keys // WARPGROUP_ROWS
    found = {
        "k": matrix((parts, WARPGROUP_ROWS, h), dtype, rows_summed=tiles.queries),
        "v": matrix((parts, WARPGROUP_ROWS, hv), dtype, rows_summed=tiles.queries),
        "loaded": plgpu.Barrier(num_arrivals=2 * parts),
        "q": matrix((tiles.stages, tiles.queries, h), dtype, rows_summed=tiles.queries),
        "dout": matrix((tiles.stages, tiles.queries, hv), dtype, rows_summed=tiles.queries),
        "rows": vector((tiles.stages, 2, tiles.queries)),
        "ranges": vector((tiles.stages, 2, tiles.queries), jnp.int32),
        "finished": plgpu.Barrier(num_arrivals=tiles.warpgroups),
    }
    copies = 4
    if operands.bias is not None:
        copies += parts
        shape = (tiles.stages * parts, WARPGROUP_ROWS, tiles.queries)
        found["bias"] = matrix(shape, operands.bias.dtype)
    found["stages"] = stage_barriers(tiles.stages, copies=copies, readers=tiles.warpgroups)
    return found


def _body(operands, tiles, q, k, v, dout, rows, ranges, visits, *others):
    *biases, dk, dv, held = others
    ops, queries, dtype = operands.ops, tiles.queries, q.dtype
    wg, batch, kv_head, tile = (
        jax.lax.axis_index(name) for name in ("wg", "batch", "kv_heads", "tiles")
    )
    parts = tiles.keys // WARPGROUP_ROWS
    masked_as = place(ranges, batch)
    walk = Walk.of(visits, *masked_as, tile)
    stages = Stages(held["stages"], tiles.stages)
    shape = (WARPGROUP_ROWS, queries)

    def keys(part):
        return pl.ds(tile * tiles.keys + part * WARPGROUP_ROWS, WARPGROUP_ROWS)

    @pl.when(wg == tiles.warpgroups)
    def _copy():
        plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
        for part in range(parts):
            mine = (batch, keys(part), kv_head)
            plgpu.copy_gmem_to_smem(k.at[mine], held["k"].at[part], held["loaded"])
            plgpu.copy_gmem_to_smem(v.at[mine], held["v"].at[part], held["loaded"])

        def of_head(of_group, _):
            head = kv_head * operands.group + of_group

            def fill(i, _):
                step = of_group * walk.steps + i
                slot, seen = stages.slot(step), pl.ds(walk.tile(i) * queries, queries)
                copies = [
                    (q.at[batch, seen, head], held["q"].at[slot]),
                    (dout.at[batch, seen, head], held["dout"].at[slot]),
                    (rows.at[batch, head, :, seen], held["rows"].at[slot]),
                    (ranges.at[*masked_as, :, seen], held["ranges"].at[slot]),
                ]
                for bias in biases:
                    for part in range(parts):
                        source = bias.at[*place(bias, batch, head), keys(part), seen]
                        copies.append((source, held["bias"].at[slot * parts + part]))
                stages.fill(step, copies)

            jax.lax.fori_loop(0, walk.steps, fill, None)

        jax.lax.fori_loop(0, operands.group, of_head, None)
        stages.drain(operands.group * walk.steps)

    def scores_and_more(slot, part, i, masked, second):
        """`p^T`, d(capped)/d(score), and `dp^T` where it is wanted."""
        pairs = [(held["k"].at[part], held["q"].at[slot])]
        if second:
            pairs.append((held["v"].at[part], held["dout"].at[slot]))
        scores, *dweights = ops.matmuls(*pairs, transpose_b=True)
        bias = ops.tile(held["bias"].at[slot * parts + part]) if biases else None
        lse = ops.vector(held["rows"].at[slot, 0], along=1)
        weights, slope = weigh(operands, scores, bias, spread(lse, shape, along=1))
        if masked:
            key = ops.iota(shape, 0) + (tile * tiles.keys + part * WARPGROUP_ROWS)
            low, high = (
                spread(ops.vector(held["ranges"].at[slot, bound], along=1), shape, along=1)
                for bound in range(2)
            )
            weights = jnp.where((key >= low) & (key < high), weights, 0.0)
        return weights, slope, dweights

    def dscores(weights, slope, dweights, slot):
        delta = spread(ops.vector(held["rows"].at[slot, 1], along=1), shape, along=1)
        return pull_back(weights, dweights, delta, slope)[1].astype(dtype)

    def both(slot, i, sums, *, masked):
        weights, slope, (dweights,) = scores_and_more(slot, wg, i, masked, True)
        narrow = weights.astype(dtype)
        of_scores = dscores(weights, slope, dweights, slot)
        return ops.accumulates(
            (sums[0], of_scores, held["q"].at[slot]), (sums[1], narrow, held["dout"].at[slot])
        )

    def only_dk(slot, i, sums, *, masked):
        weights, slope, (dweights,) = scores_and_more(slot, 0, i, masked, True)
        of_scores = dscores(weights, slope, dweights, slot)
        return (ops.accumulate(sums[0], of_scores, held["q"].at[slot]),)

    def only_dv(slot, i, sums, *, masked):
        weights, _, _ = scores_and_more(slot, 0, i, masked, False)
        return (ops.accumulate(sums[0], weights.astype(dtype), held["dout"].at[slot]),)

    def sum_over(add, *widths):
        def visit(of_group, i, sums, masked):
            step = of_group * walk.steps + i
            sums = add(stages.arrived(step), i, sums, masked=masked)
            stages.leave(step)
            return sums

        def of_head(of_group, sums):
            edge, inner = (
                lambda i, sums, masked=masked: visit(of_group, i, sums, masked)
                for masked in (True, False)
            )
            sums = jax.lax.fori_loop(0, walk.edges, edge, sums)
            return jax.lax.fori_loop(walk.edges, walk.steps, inner, sums)

        zeros = tuple(ops.full((WARPGROUP_ROWS, width), 0.0) for width in widths)
        return jax.lax.fori_loop(0, operands.group, of_head, zeros)

    def start():
        plgpu.set_max_registers(compute_registers(tiles.warpgroups), action="increase")
        stages.open()
        plgpu.barrier_wait(held["loaded"])

    def finish(sum_of, scale, staging, out, part):
        store(
            sum_of if scale is None else sum_of * scale, staging, out.at[batch, keys(part), kv_head]
        )

    h, hv = k.shape[-1], v.shape[-1]
    if not tiles.apart:

        @pl.when(wg < tiles.warpgroups)
        def _compute():
            start()
            of_k, of_v = sum_over(both, h, hv)
            finish(of_k, operands.scale, held["k"].at[wg], dk, wg)
            finish(of_v, None, held["v"].at[wg], dv, wg)
    else:

        @pl.when(wg == 0)
        def _compute_dk():
            start()
            (found,) = sum_over(only_dk, h)
            plgpu.barrier_arrive(held["finished"])
            plgpu.barrier_wait(held["finished"])
            finish(found, operands.scale, held["k"].at[0], dk, 0)

        @pl.when(wg == 1)
        def _compute_dv():
            start()
            (found,) = sum_over(only_dv, hv)
            plgpu.barrier_arrive(held["finished"])
            plgpu.barrier_wait(held["finished"])
            finish(found, None, held["v"].at[0], dv, 0)
