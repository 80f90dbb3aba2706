"""Gradients of attention's keys and values, a Mosaic kernel over tiles of keys."""

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
    vector,
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
from .backward_tiles import KeyTiles

APART_REGISTERS = {"copy": 48, "dk": 256, "dv": 200}
"""Of a thread where dk and dv are made apart; together 3 times the 168 of the start."""


def key_gradients(
    operands: Operands, tiles: KeyTiles, multiprocessors: int
) -> tuple[jax.Array, jax.Array]:
    """`dk = scale ds^T q` and `dv = p^T dout`, `[b t k h]` and `[b t k hv]`.

    A block of `tiles.keys` keys of one kv head visits the queries that see them, of all query
    heads of its group, and sums in float32: nothing is left to add. Scores are transposed, keys
    along rows, so that `p^T` and `ds^T` are in registers as the tensor cores take them.

    Where so many blocks would leave multiprocessors idle (few kv heads, few keys), each takes only
    some query heads of the group, and XLA adds up what they found, in float32 and in their order.

    Cost: 4 matmuls, 4 (h + hv) FLOPs per query, key and head in the tiles visited (`apart`: the
    scores once more); reads q and dout once per block and head, k and v once per block. Split in p,
    writes and reads 4 p b t k (h + hv) bytes more.
    """
    b, t, kv_heads, _ = operands.k.shape
    split = _split(operands.group, b * kv_heads * (t // tiles.keys), multiprocessors)
    dtype = operands.dtype if split == 1 else jnp.float32
    biases = tuple(x.swapaxes(-1, -2) for x in operands.biases)
    run = launch(
        named(attention_dk_dv, operands, tiles, split),
        out=tuple(
            jax.ShapeDtypeStruct((b, t, kv_heads * split, x.shape[-1]), dtype)
            for x in (operands.k, operands.v)
        ),
        scratch=[_scratch(operands, tiles)],
        # Under a causal mask the first tiles have most to do, and start first.
        grid={"batch": b, "parts": kv_heads * split, "tiles": t // tiles.keys},
        warpgroups=tiles.warpgroups + 1,
        interpret=operands.interpret,
    )
    dk, dv = run(*operands.arrays, operands.visits.of_keys, *operands.steps, *biases)
    if split > 1:
        dk, dv = (x.reshape(b, t, kv_heads, split, -1).sum(3) for x in (dk, dv))
    return dk.astype(operands.dtype), dv.astype(operands.dtype)


def _split(group: int, blocks: int, multiprocessors: int) -> int:
    """Into how many parts query heads of a group are split: the fewest that leave none idle."""
    parts = (p for p in range(1, group + 1) if group % p == 0)
    return next((p for p in parts if blocks * p >= multiprocessors), group)


def _scratch(operands: Operands, tiles: KeyTiles) -> dict[str, Any]:
    h, hv, dtype = operands.q.shape[-1], operands.v.shape[-1], operands.q.dtype
    parts = tiles.keys // WARPGROUP_ROWS
    scratch = {
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
        shape = (tiles.stages, parts, WARPGROUP_ROWS, tiles.queries)
        scratch["bias"] = matrix(shape, operands.bias.dtype)
    scratch["stages"] = stage_barriers(tiles.stages, copies=copies, readers=tiles.warpgroups)
    return scratch


def attention_dk_dv(operands, tiles, split, q, k, v, dout, rows, ranges, visits, *others):
    *biases, dk, dv, held = others
    ranges, visits = operands.of_step(ranges, visits, biases)
    ops, queries, dtype = operands.ops, tiles.queries, q.dtype
    wg, batch, part_of_head, tile = (
        jax.lax.axis_index(name) for name in ("wg", "batch", "parts", "tiles")
    )
    kv_head, group = jax.lax.div(part_of_head, jnp.int32(split)), operands.group // split
    parts = tiles.keys // WARPGROUP_ROWS
    alike = {"copy": COPY_REGISTERS, "both": compute_registers(tiles.warpgroups)}
    registers = APART_REGISTERS if tiles.apart else alike
    masked_as = place(ranges, batch)
    walk = Walk.of(visits, *masked_as, tile)
    stages = Stages(ops, held, held["stages"], tiles.stages, opened=True)
    shape = (WARPGROUP_ROWS, queries)

    def keys(part):
        return pl.ds(tile * tiles.keys + part * WARPGROUP_ROWS, WARPGROUP_ROWS)

    def place_of(step):
        """Step of the walk and head: the block's heads in turn, for each tile of queries."""
        heads = jnp.int32(group)
        return jax.lax.div(step, heads), part_of_head * heads + jax.lax.rem(step, heads)

    @pl.when(wg == tiles.warpgroups)
    def _copy():
        plgpu.set_max_registers(registers["copy"], action="decrease")
        for part in range(parts):
            mine = (batch, keys(part), kv_head)
            ops.copy_in(k.at[mine], held["k"].at[part], held["loaded"])
            ops.copy_in(v.at[mine], held["v"].at[part], held["loaded"])

        def fill(step, _):
            i, head = place_of(step)
            seen = pl.ds(walk.tile(i) * queries, queries)
            sources = {
                "q": q.at[batch, seen, head],
                "dout": dout.at[batch, seen, head],
                "rows": rows.at[batch, head, :, seen],
                "ranges": ranges.at[*masked_as, :, seen],
            }
            for bias in biases:
                of_head = place(bias, batch, head)
                sources["bias"] = [bias.at[*of_head, keys(part), seen] for part in range(parts)]
            stages.fill(step, sources)

        jax.lax.fori_loop(0, group * walk.steps, fill, None)
        stages.drain(group * walk.steps)

    def weights_of(slot, part, masked, *more):
        """`p^T`, d(capped)/d(score), and the products of `more` pairs."""
        pairs = (held["k"].at[part], held["q"].at[slot]), *more
        scores, *products = ops.matmuls(*pairs, transpose_b=True)
        bias = ops.tile(held["bias"].at[slot, part]) if biases else None
        lse = spread(ops.vector(held["rows"].at[slot, 0], along=1), shape, along=1)
        weights, slope = weigh(operands, scores, bias, lse)
        if masked:
            key = ops.iota(shape, 0) + (tile * tiles.keys + part * WARPGROUP_ROWS)
            low, high = (
                spread(ops.vector(held["ranges"].at[slot, bound], along=1), shape, along=1)
                for bound in range(2)
            )
            weights = jnp.where((key >= low) & (key < high), weights, 0.0)
        return weights, slope, *products

    def with_dscores(slot, part, masked):
        """`p^T` and `ds^T`, as operands."""
        pair = held["v"].at[part], held["dout"].at[slot]
        weights, slope, dweights = weights_of(slot, part, masked, pair)
        delta = spread(ops.vector(held["rows"].at[slot, 1], along=1), shape, along=1)
        return weights.astype(dtype), pull_back(weights, dweights, delta, slope)[1].astype(dtype)

    def add_both(slot, sums, masked):
        weights, dscores = with_dscores(slot, wg, masked)
        of_k, of_v = sums
        return ops.accumulates(
            (of_k, dscores, held["q"].at[slot]), (of_v, weights, held["dout"].at[slot])
        )

    def add_dk(slot, of_k, masked):
        _, dscores = with_dscores(slot, 0, masked)
        return ops.accumulate(of_k, dscores, held["q"].at[slot])

    def add_dv(slot, of_v, masked):
        weights, _ = weights_of(slot, 0, masked)
        return ops.accumulate(of_v, weights.astype(dtype), held["dout"].at[slot])

    def sum_over_steps(add, role, zeros):
        plgpu.set_max_registers(registers[role], action="increase")
        stages.open()
        plgpu.barrier_wait(held["loaded"])

        def visit(step, sums, *, masked):
            sums = add(stages.arrived(step), sums, masked)
            stages.leave(step)
            return sums

        edges, steps = group * walk.edges, group * walk.steps
        sums = jax.lax.fori_loop(0, edges, functools.partial(visit, masked=True), zeros)
        sums = jax.lax.fori_loop(edges, steps, functools.partial(visit, masked=False), sums)
        # Where both warpgroups read the same keys: neither may store over them before.
        plgpu.barrier_arrive(held["finished"])
        plgpu.barrier_wait(held["finished"])
        return sums

    def zeros(of):
        return ops.full((WARPGROUP_ROWS, of.shape[-1]), 0.0)

    def finish_dk(acc, part):
        out = dk.at[batch, keys(part), part_of_head]
        store(ops, acc * operands.scale, held["k"].at[part], out)

    def finish_dv(acc, part):
        out = dv.at[batch, keys(part), part_of_head]
        store(ops, acc, held["v"].at[part], out)

    if tiles.apart:
        pl.when(wg == 0)(lambda: finish_dk(sum_over_steps(add_dk, "dk", zeros(k)), 0))
        pl.when(wg == 1)(lambda: finish_dv(sum_over_steps(add_dv, "dv", zeros(v)), 0))
        return

    @pl.when(wg < tiles.warpgroups)
    def _compute():
        of_k, of_v = sum_over_steps(add_both, "both", (zeros(k), zeros(v)))
        finish_dk(of_k, wg)
        finish_dv(of_v, wg)
