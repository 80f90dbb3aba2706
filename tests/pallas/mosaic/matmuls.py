"""A small kernel with every piece of the workshop: two matmuls, rows scaled between them."""

import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from colossax.pallas.mosaic import Ops, launch, matrix, spread, vector

ROWS, KEYS, WIDTH = 64, 128, 64


def scaled(q: Any, k: Any, v: Any, w: Any, *, interpret: bool, forget: str = "") -> jax.Array:
    """`((q @ k.T) * w[:, None]) @ v`; `forget` leaves out a synchronisation."""
    ops = Ops(interpret=interpret)
    square = (KEYS, WIDTH)
    scratch = [
        matrix((ROWS, WIDTH), q.dtype),
        matrix(square, q.dtype),
        matrix(square, q.dtype),
        vector((ROWS,)),
        plgpu.Barrier(num_arrivals=4),
    ]
    run = launch(
        functools.partial(_body, ops, forget),
        out=(jax.ShapeDtypeStruct(q.shape, q.dtype),),
        scratch=scratch,
        grid={"rows": q.shape[0] // ROWS},
        warpgroups=2,
        interpret=interpret,
    )
    return run(q, k, v, w)[0]


def _body(ops: Ops, forget: str, q, k, v, w, out, qs, ks, vs, ws, arrived):
    mine = pl.ds(jax.lax.axis_index("rows") * ROWS, ROWS)

    @pl.when(jax.lax.axis_index("wg") == 0)
    def _load():
        ops.copy_in(q.at[mine], qs, arrived)
        ops.copy_in(k, ks, arrived)
        ops.copy_in(v, vs, arrived)
        ops.copy_in(w.at[mine], ws, arrived)

    @pl.when(jax.lax.axis_index("wg") == 1)
    def _compute():
        if forget != "wait":
            plgpu.barrier_wait(arrived)
        scores = ops.matmul(qs, ks, transpose_b=True)
        scores = scores * spread(ops.vector(ws), scores.shape)
        acc = ops.accumulate(ops.full((ROWS, WIDTH), 0.0), scores.astype(q.dtype), vs)
        qs[...] = acc.astype(q.dtype)
        if forget != "commit":
            plgpu.commit_smem()
        ops.copy_out(qs, out.at[mine])
        plgpu.wait_smem_to_gmem(0)
