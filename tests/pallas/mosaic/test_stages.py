"""Stages are filled, read and filled again, in the interpreter, which looks for races."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from colossax.compat import races_found
from colossax.pallas.mosaic import Ops, Stages, launch, matrix, stage_barriers

READERS, ROWS, COLUMNS = 2, 64, 64


def summed(x, y, *, count, opened):
    """`x` summed over steps and, for each reader, its part of `y`."""
    shape = (ROWS, COLUMNS)
    run = launch(
        functools.partial(body, count, opened),
        out=(jax.ShapeDtypeStruct((READERS, *shape), jnp.float32),),
        scratch={
            "x": matrix((count, *shape), x.dtype),
            "y": matrix((count, READERS, *shape), y.dtype),
            "stages": stage_barriers(count, copies=1 + READERS, readers=READERS),
        },
        grid={"one": 1},
        warpgroups=READERS + 1,
        interpret=True,
    )
    return run(x, y)[0]


def body(count, opened, x, y, out, held):
    stages = Stages(Ops(interpret=True), held, held["stages"], count, opened=opened)
    steps, wg = x.shape[0], jax.lax.axis_index("wg")

    @pl.when(wg == READERS)
    def _fill():
        def fill(step, _):
            stages.fill(step, {"x": x.at[step], "y": [y.at[step, i] for i in range(READERS)]})

        jax.lax.fori_loop(0, steps, fill, None)
        stages.drain(jnp.int32(steps))

    @pl.when(wg < READERS)
    def _read():
        if opened:
            stages.open()

        def add(step, acc):
            slot = stages.arrived(step)
            found = held["x"].at[slot][...] + held["y"].at[slot, wg][...]
            plgpu.commit_smem()
            stages.leave(step)
            return acc + found

        zeros = jnp.zeros((ROWS, COLUMNS), jnp.float32)
        out.at[wg][...] = jax.lax.fori_loop(0, steps, add, zeros)


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize(("count", "steps"), [(1, 3), (2, 5), (3, 2)])
def test_every_step_is_read_whole_by_every_reader(count, steps, opened):
    rng = np.random.default_rng(0)
    x = rng.integers(-8, 8, (steps, ROWS, COLUMNS)).astype(np.float32)
    y = rng.integers(-8, 8, (steps, READERS, ROWS, COLUMNS)).astype(np.float32)
    found = jax.jit(functools.partial(summed, count=count, opened=opened))(x, y)
    assert not races_found()
    np.testing.assert_array_equal(found, x.sum(0) + y.sum(0))
