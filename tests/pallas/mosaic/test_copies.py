"""Copies that start within a tile of shared memory leave out what hardware would."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from colossax.compat import races_found
from colossax.pallas.mosaic import Ops, launch, matrix, vector

ROWS, COLUMNS, TILE = 96, 128, (8, 64)
SIZE = (32, 64)
X = np.random.default_rng(0).normal(size=(ROWS, COLUMNS)).astype(jnp.bfloat16)


@jax.jit
def copied(starts, before):
    """A part of `before` copied to another place in it; starts are `(row, column, row, column)`."""
    return _copied(starts, before, matrix)


@jax.jit
def copied_through_plain_memory(starts, before):
    return _copied(starts, before, vector)


def _copied(starts, before, kind):
    ops = Ops(interpret=True)

    def body(starts, x, out, held, whole, arrived):
        rows, columns, to_rows, to_columns = (starts[i] for i in range(4))
        ops.copy_in(x, whole, arrived)
        plgpu.barrier_wait(arrived)
        ops.copy_out(whole, out)
        plgpu.wait_smem_to_gmem(0)
        source = x.at[pl.ds(rows, SIZE[0])].at[:, pl.ds(columns, SIZE[1])]
        ops.copy_in(source, held, arrived)
        plgpu.barrier_wait(arrived)
        ops.copy_out(held, out.at[pl.ds(to_rows, SIZE[0]), pl.ds(to_columns, SIZE[1])])
        plgpu.wait_smem_to_gmem(0)

    shared = [kind(SIZE, before.dtype), vector(before.shape, before.dtype)]
    run = launch(
        body,
        out=(jax.ShapeDtypeStruct(before.shape, before.dtype),),
        scratch=[*shared, plgpu.Barrier(num_arrivals=1)],
        grid={"block": 1},
        warpgroups=1,
        interpret=True,
    )
    return run(starts, before)[0]


def box(start):
    """What is copied: in each tile, as much as is left of a tile of global memory."""
    found = np.zeros(SIZE, bool)
    for index in np.ndindex(*SIZE):
        within = [i % n + s % n for i, s, n in zip(index, start, TILE, strict=True)]
        found[index] = all(i < n for i, n in zip(within, TILE, strict=True))
    return found


def part(x, start):
    return x[start[0] : start[0] + SIZE[0], start[1] : start[1] + SIZE[1]]


@pytest.mark.parametrize(
    ("start", "to"),
    [((16, 64), (40, 0)), ((19, 0), (8, 64)), ((8, 0), (33, 64)), ((5, 24), (50, 16))],
    ids=["whole tiles", "read within", "written within", "both, columns too"],
)
def test_only_whole_tiles_are_whole(start, to):
    want = X.copy()
    read = np.where(box(start), part(X, start), 0)
    part(want, to)[...] = np.where(box(to), read, part(want, to))
    found = copied(jnp.asarray([*start, *to], jnp.int32), X)
    assert not races_found()
    np.testing.assert_array_equal(found, want)


def test_plain_memory_takes_any_rows():
    start, to = (19, 0), (33, 64)
    want = X.copy()
    part(want, to)[...] = part(X, start)
    found = copied_through_plain_memory(jnp.asarray([*start, *to], jnp.int32), X)
    assert not races_found()
    np.testing.assert_array_equal(found, want)


def test_rows_that_no_tiles_make_up_are_refused():
    with pytest.raises(AssertionError, match="89 in global memory are no multiple of a tile's 8"):
        copied(jnp.zeros(4, jnp.int32), X[:89])
