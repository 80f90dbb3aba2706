"""Tiles own every row of every group once, and are as few as they can be."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colossax.pallas.grouped_matmul import mosaic_gpu, xla
from colossax.pallas.grouped_matmul.schedule import most_visits, row_visits, visits_of_groups
from tests.pallas.grouped_matmul.cases import GROUPS, ROWS

TILE = 32
ALIGNED = {
    align: jax.jit(
        lambda sizes, align=align: dataclasses.asdict(row_visits(sizes, ROWS, TILE, align=align))
    )
    for align in (1, 8)
}
CUTS = st.lists(st.integers(0, ROWS), min_size=GROUPS, max_size=GROUPS).map(sorted)


@pytest.mark.parametrize("align", ALIGNED)
@settings(max_examples=60)
@given(CUTS)
def test_every_row_is_owned_once_by_a_tile_of_its_group(align, cuts):
    sizes = np.diff([0, *cuts]).astype(np.int32)
    visits = types.SimpleNamespace(**jax.device_get(ALIGNED[align](jnp.asarray(sizes))))
    count = int(visits.count[0])
    owners = np.full(ROWS, -1)
    for i in range(count):
        first, low, high = (int(z[i]) for z in (visits.first, visits.low, visits.high))
        assert 0 <= first <= ROWS - TILE
        assert first % align == 0
        assert 0 <= low < high <= TILE
        own = owners[first + low : first + high]
        assert (own == -1).all()
        own[:] = visits.group[i]
    assert (owners == np.repeat(np.arange(GROUPS + 1), [*sizes, ROWS - cuts[-1]])).all()
    # No fewer would do, and rows multiplied exceed those there by less than a tile per group.
    bounds = zip((0, *cuts), (*cuts, ROWS), strict=True)
    assert count == sum(-((a // align * align - b) // TILE) for a, b in bounds if a < b)
    of_groups = int(np.sum(visits.group[:count] < GROUPS))
    assert of_groups <= most_visits(cuts[-1], GROUPS - 1, TILE, align)


@pytest.mark.parametrize(
    ("align", "sizes", "rows"),
    [
        # Every group one row into a new tile, the rows behind them too.
        (1, [33, 33, 33, 1], 132),
        # As many rows as a tile has, of two tiles; the last seven are of another.
        (8, [1, 32, 32, 32], 104),
    ],
)
def test_the_most_visits_are_needed_by_some_sizes(align, sizes, rows):
    visits = row_visits(jnp.asarray(sizes, jnp.int32), rows, TILE, align=align)
    assert most_visits(rows, GROUPS, TILE, align) == int(visits.count[0])


def test_sizes_beyond_the_rows_are_cut_off():
    visits = row_visits(jnp.asarray([150, 150, 150, 150], jnp.int32), ROWS, TILE)
    count = int(visits.count[0])
    assert int(np.sum((visits.high - visits.low)[:count])) == ROWS


@pytest.mark.catches("grouped-rows-behind-multiplied")
@pytest.mark.parametrize(
    ("tile", "align"), [(mosaic_gpu.ROWS, mosaic_gpu.ALIGN), (xla.LARGEST_TILE, 1)]
)
@pytest.mark.parametrize("groups", [8, 128])
def test_tiles_of_an_even_load_have_a_tenth_more_rows_than_it(tile, align, groups):
    """Of 2048 rows a group, and a quarter more behind them, as a buffer with some to spare has."""
    rows = 2048 * groups
    even = np.full(groups, 2048)
    drawn = np.random.default_rng(0).multinomial(rows, np.full(groups, 1 / groups))
    for sizes, most in ((even, 1.0), (drawn, 1.10)):
        visits = row_visits(jnp.asarray(sizes, jnp.int32), rows * 5 // 4, tile, align=align)
        assert int(visits_of_groups(visits, groups)) * tile <= most * rows
