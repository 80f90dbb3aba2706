"""Gradient of attention's queries, a Mosaic kernel over tiles of queries."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from colossax.pallas.mosaic import (
    WARPGROUP_ROWS,
    Stages,
    launch,
    matrix,
    spread,
    stage_barriers,
)

from .backward_operands import (
    COPY_REGISTERS,
    Operands,
    Walk,
    compute_registers,
    named,
    place,
    pull_back,
    store,
    weigh,
)
from .backward_tiles import QueryTiles


def query_gradient(operands: Operands, tiles: QueryTiles) -> jax.Array:
    """`dq = scale ds k`, `[b s n h]`, with `ds = p (dp - delta)`, `p = exp(logit - lse)`.

    A block of `tiles.rows` queries of one head visits the key tiles that they see.

    Cost: 3 matmuls, 2 (2 h + hv) FLOPs per query, key and head in the tiles visited; reads k and v
    once per block, q and dout once.
    """
    b, s, n, _ = operands.q.shape
    run = launch(
        named(attention_dq, operands, tiles),
        out=(jax.ShapeDtypeStruct(operands.q.shape, operands.dtype),),
        scratch=[_scratch(operands, tiles)],
        grid={"batch": b, "heads": n, "tiles": s // tiles.rows},
        warpgroups=tiles.warpgroups + 1,
        interpret=operands.interpret,
    )
    return run(*operands.arrays, operands.visits.of_queries, *operands.steps, *operands.biases)[0]


def _scratch(operands: Operands, tiles: QueryTiles) -> dict[str, Any]:
    h, hv, dtype = operands.q.shape[-1], operands.v.shape[-1], operands.q.dtype
    scratch = {
        "q": matrix((tiles.warpgroups, WARPGROUP_ROWS, h), dtype, rows_summed=tiles.keys),
        "dout": matrix((tiles.warpgroups, WARPGROUP_ROWS, hv), dtype),
        "loaded": plgpu.Barrier(num_arrivals=2 * tiles.warpgroups),
        "k": matrix((tiles.stages, tiles.keys, h), dtype, rows_summed=tiles.keys),
        "v": matrix((tiles.v_stages, tiles.keys, hv), dtype),
        "v_stages": stage_barriers(tiles.v_stages, copies=1, readers=tiles.warpgroups),
    }
    copies = 1
    if operands.bias is not None:
        copies += tiles.warpgroups
        shape = (tiles.stages, tiles.warpgroups, WARPGROUP_ROWS, tiles.keys)
        scratch["bias"] = matrix(shape, operands.bias.dtype)
    scratch["k_stages"] = stage_barriers(tiles.stages, copies=copies, readers=tiles.warpgroups)
    return scratch


def attention_dq(operands, tiles, q, k, v, dout, rows, ranges, visits, *others):
    *biases, dq, held = others
    ranges, visits = operands.of_step(ranges, visits, biases)
    ops, keys = operands.ops, tiles.keys
    wg, batch, head = (jax.lax.axis_index(name) for name in ("wg", "batch", "heads"))
    # Under a causal mask the last tiles have most to do: they start first.
    tile = visits.shape[1] - 1 - jax.lax.axis_index("tiles")
    kv_head = jax.lax.div(head, jnp.int32(operands.group))
    masked_as = place(ranges, batch)
    walk = Walk.of(visits, *masked_as, tile)
    k_stages = Stages(ops, held, held["k_stages"], tiles.stages, opened=True)
    v_stages = Stages(ops, held, held["v_stages"], tiles.v_stages, opened=True)

    def queries(of):
        return pl.ds(tile * tiles.rows + of * WARPGROUP_ROWS, WARPGROUP_ROWS)

    @pl.when(wg == tiles.warpgroups)
    def _copy():
        plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
        for i in range(tiles.warpgroups):
            mine = (batch, queries(i), head)
            ops.copy_in(q.at[mine], held["q"].at[i], held["loaded"])
            ops.copy_in(dout.at[mine], held["dout"].at[i], held["loaded"])

        def fill(step, _):
            seen = pl.ds(walk.tile(step) * keys, keys)
            sources = {"k": k.at[batch, seen, kv_head]}
            for bias in biases:
                parts = (queries(of) for of in range(tiles.warpgroups))
                of_head = place(bias, batch, head)
                sources["bias"] = [bias.at[*of_head, part, seen] for part in parts]
            k_stages.fill(step, sources)
            v_stages.fill(step, {"v": v.at[batch, seen, kv_head]})

        jax.lax.fori_loop(0, walk.steps, fill, None)
        k_stages.drain(walk.steps)
        v_stages.drain(walk.steps)

    @pl.when(wg < tiles.warpgroups)
    def _compute():
        plgpu.set_max_registers(compute_registers(tiles.warpgroups), action="increase")
        k_stages.open()
        v_stages.open()
        mine = queries(wg)
        lse, delta = (ops.vector(rows.at[batch, head, i, mine]) for i in range(2))
        lo, hi = (ops.vector(ranges.at[*masked_as, i, mine]) for i in range(2))
        shape = (WARPGROUP_ROWS, keys)
        q_held, dout_held = held["q"].at[wg], held["dout"].at[wg]
        plgpu.barrier_wait(held["loaded"])

        def visit(step, acc, *, masked):
            slot = k_stages.arrived(step)
            k_held = held["k"].at[slot]
            v_held = held["v"].at[v_stages.arrived(step)]
            pairs = (q_held, k_held), (dout_held, v_held)
            scores, dweights = ops.matmuls(*pairs, transpose_b=True)
            v_stages.leave(step)
            bias = ops.tile(held["bias"].at[slot, wg]) if biases else None
            weights, slope = weigh(operands, scores, bias, spread(lse, shape))
            if masked:
                # Not `lo - tile * keys`: indices that no step changes are kept in registers.
                key = ops.iota(shape, 1) + walk.tile(step) * keys
                low, high = (spread(x, shape) for x in (lo, hi))
                weights = jnp.where((key >= low) & (key < high), weights, 0.0)
            _, dscores = pull_back(weights, dweights, spread(delta, shape), slope)
            acc = ops.accumulate(acc, dscores.astype(k.dtype), k_held)
            k_stages.leave(step)
            return acc

        acc = ops.full((WARPGROUP_ROWS, q.shape[-1]), 0.0)
        acc = jax.lax.fori_loop(0, walk.edges, functools.partial(visit, masked=True), acc)
        inner = functools.partial(visit, masked=False)
        acc = jax.lax.fori_loop(walk.edges, walk.steps, inner, acc)
        store(ops, acc * operands.scale, q_held, dq.at[batch, mine, head])
