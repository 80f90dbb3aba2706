"""The kernels in the interpreter, races looked for, against float64."""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.pallas.grouped_matmul import grouped_matmul
from colossax.pallas.grouped_matmul import mosaic_gpu as kernels
from colossax.pallas.target import on_device
from tests.pallas.grouped_matmul.cases import SIZES, error, operands, truth
from tests.pallas.places import everywhere, no_races

D, F = 128, 128
# Two blocks share the tiles, two stages the steps, so that both are used again and again.
TILES = kernels.Tiles(columns=128, stages=2, blocks=2)


jitted = functools.partial(jax.jit, static_argnames=("place", "tiles"))


@jitted
def forward(x, w, sizes, place, tiles=TILES):
    return kernels.multiply(x, w, sizes, tiles=tiles, interpret=place == "interpret")


@jitted
def by_x(dy, w, sizes, place, tiles=TILES):
    return kernels.multiply(
        dy, w, sizes, transposed=True, tiles=tiles, interpret=place == "interpret"
    )


@jitted
def by_w(x, dy, sizes, place, tiles=TILES):
    return kernels.weight_gradient(x, dy, sizes, tiles=tiles, interpret=place == "interpret")


def arrays(d=D, f=F, dtype=jnp.bfloat16, **kind):
    return tuple(jnp.asarray(z, dtype) for z in operands(d, f, **kind))


def check(found, want, tolerance, place):
    assert error(found, want) < tolerance
    assert no_races(place)


@everywhere
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_groups_of_every_kind(sizes, place):
    x, w, dy = arrays()
    out, dx, dw = truth(x, w, dy, sizes)
    counts = jnp.asarray(sizes, jnp.int32)
    check(forward(x, w, counts, place), out, 3e-3, place)
    check(by_x(dy, w, counts, place), dx, 3e-3, place)
    check(by_w(x, dy, counts, place), dw, 5e-3, place)


@everywhere
def test_wide_tiles_as_shipped_with_float16(place):
    tiles = kernels.WIDE
    x, w, dy = arrays(f=tiles.columns, dtype=jnp.float16, rows=160, groups=2)
    sizes = [97, 63]
    out, _, dw = truth(x, w, dy, sizes)
    counts = jnp.asarray(sizes, jnp.int32)
    check(forward(x, w, counts, place, tiles), out, 1e-3, place)
    check(by_w(x, dy, counts, place, tiles), dw, 1e-3, place)


@everywhere
@pytest.mark.parametrize("rows, counts", [(40, [30, 9]), (131, [70, 61])])
def test_sizes_that_are_no_multiple_of_a_tile_are_padded(rows, counts, place):
    # Through the call, with narrow tiles as shipped; rows fewer than a tile's, or no multiple of 8.
    x, w, dy = arrays(d=72, f=136, rows=rows, groups=2)
    sizes = jnp.asarray(counts, jnp.int32)
    call = functools.partial(grouped_matmul, group_sizes=sizes, implementation=place)
    out, transposed = jax.vjp(jax.jit(call), x, w)
    found = (out, *transposed(dy))
    for one, want in zip(found, truth(x, w, dy, counts), strict=True):
        check(one, want, 5e-3, place)


@everywhere
@pytest.mark.catches("grouped-rows-of-others")
def test_infinite_rows_of_others_stay_there(place):
    x, _, dy = arrays(rows=100, groups=2)
    counts, row = [30, 40], jnp.arange(100)[:, None]
    dw = truth(x, np.zeros((2, D, F)), dy, counts)[2]
    others = (row < 30) | (row >= 70)
    x, dy = jnp.where(others, jnp.inf, x), jnp.where(others, jnp.nan, dy)
    check(by_w(x, dy, jnp.asarray(counts, jnp.int32), place)[1], dw[1], 5e-3, place)


@pytest.mark.parametrize(
    ("multiprocessors", "spared", "blocks"),
    [(None, 0, 132), (114, 0, 114), (132, 8, 124), (4, 9, 1)],
)
def test_a_block_stays_on_each_multiprocessor_that_is_not_spared(multiprocessors, spared, blocks):
    x, w = jnp.zeros((8192, 1024), jnp.bfloat16), jnp.zeros((2, 1024, 1024), jnp.bfloat16)
    sizes = jnp.asarray([4096, 4096], jnp.int32)
    hopper = types.SimpleNamespace(
        platform="cuda", compute_capability="9.0", core_count=multiprocessors
    )

    def both(x, w):
        out, pull = jax.vjp(lambda x: grouped_matmul(x, w, sizes, spare_multiprocessors=spared), x)
        return pull(out)

    with on_device(hopper):
        text = str(jax.make_jaxpr(both)(x, w))
    # Forward and by x; the gradient by w has a block for each tile.
    assert re.findall(r"grid=\((\d+),\)", text) == [str(blocks)] * 2


def test_as_many_as_nobody_has_are_not_spared():
    with pytest.raises(ValueError, match="spare_multiprocessors is -1; give 0 or more"):
        arrays = jnp.zeros((8, 8)), jnp.zeros((1, 8, 8)), jnp.asarray([8])
        grouped_matmul(*arrays, spare_multiprocessors=-1)


@pytest.mark.parametrize("down, across, strip", [(1, 1, 8), (3, 5, 2), (4, 8, 8), (2, 9, 4)])
def test_strips_hold_every_tile_once(down, across, strip):
    found = [
        tuple(map(int, kernels._in_strips(jnp.int32(i), jnp.int32(down), across, strip)))
        for i in range(down * across)
    ]
    assert sorted(found) == [(row, column) for row in range(down) for column in range(across)]
    # The first tiles are of few columns: those of one strip.
    assert {column for _, column in found[: down * min(strip, across)]} == set(
        range(min(strip, across))
    )
