"""Gradient of attention's bias, a Mosaic kernel over tiles of both queries and keys."""

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
    compute_registers,
    named,
    place,
    pull_back,
    weigh,
)
from .backward_tiles import BiasTiles


def bias_gradient(operands: Operands, tiles: BiasTiles) -> jax.Array:
    """`dbias = p (dp - delta)`, float32 in the shape of the bias, summed where that is 1.

    A block has one tile of the bias. It loops over the rows of the batch and the heads that share
    it and sums in registers; tiles that nobody sees are zeros.

    Cost: 2 matmuls, 2 (h + hv) FLOPs per query, key and head in the tiles visited; reads q and
    dout once per tile of keys and k and v once per tile of queries and head; writes the bias once,
    where one array of all probabilities would be `b n s t`.
    """
    *shared, s, t = operands.bias.shape
    run = launch(
        named(attention_dbias, operands, tiles),
        out=(jax.ShapeDtypeStruct(operands.bias.shape, jnp.float32),),
        scratch=[_scratch(operands, tiles)],
        grid={
            "batch": shared[0],
            "heads": shared[1],
            "rows": s // tiles.rows,
            "keys": t // tiles.keys,
        },
        warpgroups=tiles.warpgroups + 1,
        interpret=operands.interpret,
    )
    return run(*operands.arrays, operands.visits.of_bias, operands.bias)[0]


def _scratch(operands: Operands, tiles: BiasTiles) -> dict[str, Any]:
    h, hv, dtype = operands.q.shape[-1], operands.v.shape[-1], operands.q.dtype
    parts = (tiles.stages, tiles.warpgroups, WARPGROUP_ROWS)
    return {
        "bias": matrix((tiles.warpgroups, WARPGROUP_ROWS, tiles.keys), operands.bias.dtype),
        "loaded": plgpu.Barrier(num_arrivals=tiles.warpgroups),
        "q": matrix((*parts, h), dtype),
        "dout": matrix((*parts, hv), dtype),
        "k": matrix((tiles.stages, tiles.keys, h), dtype),
        "v": matrix((tiles.stages, tiles.keys, hv), dtype),
        "stages": stage_barriers(
            tiles.stages, copies=2 + 2 * tiles.warpgroups, readers=tiles.warpgroups
        ),
    }


def attention_dbias(operands, tiles, q, k, v, dout, rows, ranges, visits, bias, dbias, held):
    ops = operands.ops
    wg, of_batch, of_head, row, key = (
        jax.lax.axis_index(name) for name in ("wg", "batch", "heads", "rows", "keys")
    )
    # What the loops go over: all that share this tile of the bias.
    batches = q.shape[0] if bias.shape[0] == 1 else 1
    heads = q.shape[2] if bias.shape[1] == 1 else 1
    stages = Stages(ops, held, held["stages"], tiles.stages, opened=True)
    shape = (WARPGROUP_ROWS, tiles.keys)
    keys = pl.ds(key * tiles.keys, tiles.keys)

    def queries(of):
        return pl.ds(row * tiles.rows + of * WARPGROUP_ROWS, WARPGROUP_ROWS)

    def seen(batch):
        """Heads of a row of the batch for which this tile counts: with a mask, and without."""
        first, inner_first, inner_last, last = (
            visits[*place(ranges, batch), row, i] for i in range(4)
        )
        inner = (key >= inner_first) & (key < inner_last)
        visited = (key >= first) & (key < last)
        none = jnp.int32(0)
        return (
            jnp.where(visited & ~inner, jnp.int32(heads), none),
            jnp.where(inner, jnp.int32(heads), none),
        )

    @pl.when(wg == tiles.warpgroups)
    def _copy():
        plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
        for of in range(tiles.warpgroups):
            source = bias.at[of_batch, of_head, queries(of), keys]
            ops.copy_in(source, held["bias"].at[of], held["loaded"])

        def of_row(i, step):
            batch = of_batch + i

            def fill(j, step):
                head = of_head + j
                of_keys = (batch, keys, jax.lax.div(head, jnp.int32(operands.group)))
                parts = [(batch, queries(of), head) for of in range(tiles.warpgroups)]
                sources = {
                    "k": k.at[of_keys],
                    "v": v.at[of_keys],
                    "q": [q.at[part] for part in parts],
                    "dout": [dout.at[part] for part in parts],
                }
                stages.fill(step, sources)
                return step + 1

            return jax.lax.fori_loop(0, sum(seen(batch)), fill, step)

        steps = jax.lax.fori_loop(0, batches, of_row, jnp.int32(0))
        stages.drain(steps)

    @pl.when(wg < tiles.warpgroups)
    def _compute():
        plgpu.set_max_registers(compute_registers(tiles.warpgroups), action="increase")
        stages.open()
        plgpu.barrier_wait(held["loaded"])
        mine = queries(wg)

        def visit(batch, j, carry, *, masked):
            step, acc = carry
            head = of_head + j
            lse, delta = (ops.vector(rows.at[batch, head, i, mine]) for i in range(2))
            slot = stages.arrived(step)
            scores, dweights = ops.matmuls(
                (held["q"].at[slot, wg], held["k"].at[slot]),
                (held["dout"].at[slot, wg], held["v"].at[slot]),
                transpose_b=True,
            )
            stages.leave(step)
            added = ops.tile(held["bias"].at[wg])
            weights, _ = weigh(operands, scores, added, spread(lse, shape))
            if masked:
                key_index = ops.iota(shape, 1) + key * tiles.keys
                low, high = (
                    spread(ops.vector(ranges.at[*place(ranges, batch), i, mine]), shape)
                    for i in range(2)
                )
                weights = jnp.where((key_index >= low) & (key_index < high), weights, 0.0)
            gradient, _ = pull_back(weights, dweights, spread(delta, shape), None)
            return step + 1, acc + gradient

        def of_row(i, carry):
            batch = of_batch + i
            edges, inner = seen(batch)
            for count, masked in ((edges, True), (inner, False)):
                add = functools.partial(visit, batch, masked=masked)
                carry = jax.lax.fori_loop(0, count, add, carry)
            return carry

        zeros = ops.full(shape, 0.0)
        _, acc = jax.lax.fori_loop(0, batches, of_row, (jnp.int32(0), zeros))
        dbias.at[of_batch, of_head, mine, keys][...] = acc
