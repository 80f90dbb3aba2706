"""Tiles own every row of every group once, and are as few as they can be."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from colossax.pallas.grouped_matmul.schedule import most_visits, row_visits
from tests.pallas.grouped_matmul.cases import GROUPS, ROWS

TILE = 32
VISITS = jax.jit(lambda sizes: dataclasses.asdict(row_visits(sizes, ROWS, TILE)))
CUTS = st.lists(st.integers(0, ROWS), min_size=GROUPS, max_size=GROUPS).map(sorted)


@settings(deadline=None, max_examples=60)
@given(CUTS)
def test_every_row_is_owned_once_by_a_tile_of_its_group(cuts):
    sizes = np.diff([0, *cuts]).astype(np.int32)
    visits = types.SimpleNamespace(**jax.device_get(VISITS(jnp.asarray(sizes))))
    count = int(visits.count[0])
    owners = np.full(ROWS, -1)
    for i in range(count):
        first, low, high = (int(z[i]) for z in (visits.first, visits.low, visits.high))
        assert 0 <= first <= ROWS - TILE
        assert 0 <= low < high <= TILE
        own = owners[first + low : first + high]
        assert (own == -1).all()
        own[:] = visits.group[i]
    assert (owners == np.repeat(np.arange(GROUPS + 1), [*sizes, ROWS - cuts[-1]])).all()
    # No fewer would do, and rows multiplied exceed those there by less than a tile per group.
    assert count == sum(-(-int(n) // TILE) for n in (*sizes, ROWS - cuts[-1]))
    of_groups = int(np.sum(visits.group[:count] < GROUPS))
    assert of_groups * TILE <= cuts[-1] + GROUPS * (TILE - 1)


def test_the_most_visits_are_needed_by_some_sizes():
    # Every group one row into a new tile, the rows behind them too.
    sizes = jnp.asarray([33, 33, 33, 1], jnp.int32)
    assert most_visits(132, GROUPS, TILE) == int(row_visits(sizes, 132, TILE).count[0])


def test_sizes_beyond_the_rows_are_cut_off():
    visits = row_visits(jnp.asarray([150, 150, 150, 150], jnp.int32), ROWS, TILE)
    count = int(visits.count[0])
    assert int(np.sum((visits.high - visits.low)[:count])) == ROWS
