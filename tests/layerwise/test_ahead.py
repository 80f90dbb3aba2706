"""Rows that were fetched a turn before are those that the turn wants."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.layerwise.ahead import Ahead
from colossax.offload.memory import HOST

COUNT = 4
STACKS = {
    "there": np.arange(COUNT * 6, dtype=np.float32).reshape(COUNT, 2, 3),
    "here": np.arange(COUNT * 2, dtype=np.float32).reshape(COUNT, 2),
}


def rows_of(step):
    """What each turn of a loop gets, in the order of the rows, and how much it carries."""
    carried = []

    def all_rows(there, here):
        stacks = {"there": jax.device_put(there, HOST), "here": here}
        first, last = (0, COUNT - 1) if step > 0 else (COUNT - 1, 0)
        ahead = Ahead(stacks, last)

        def turn(k, loop):
            found, slots = loop
            carried.append(slots)
            row, slots = ahead.turn(slots, first + step * k, step)
            place = functools.partial(jax.lax.dynamic_update_index_in_dim, axis=0)
            at = first + step * k
            return {name: place(found[name], row[name], at) for name in found}, slots

        zeros = jax.tree.map(jnp.zeros_like, {"there": there, "here": here})
        return jax.lax.fori_loop(0, COUNT, turn, (zeros, ahead.first(first)))[0]

    return jax.jit(all_rows)(STACKS["there"], STACKS["here"]), carried[-1]


@pytest.mark.catches("ahead-of-another-row")
@pytest.mark.parametrize("step", [1, -1])
def test_every_turn_gets_its_row(step):
    found, carried = rows_of(step)
    jax.tree.map(np.testing.assert_array_equal, found, STACKS)
    assert [slot.shape for slot in carried] == [(2, 3)]
