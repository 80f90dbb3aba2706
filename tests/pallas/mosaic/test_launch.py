"""A kernel in place reads what it wrote, in the interpreter as on hardware."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from colossax.compat import races_found
from colossax.pallas.mosaic import launch

ROWS, BLOCKS = 8, 3
X = np.arange(BLOCKS * ROWS, dtype=np.float32)


def twice_added(added, x, *, in_place):
    """Each block adds one to all that is in `x` and then, read anew, `added`."""

    def body(added, x, out):
        mine = pl.ds(jax.lax.axis_index("block") * ROWS, ROWS)
        out[mine] = x[mine] + 1
        out[mine] = x[mine] + added[mine]

    run = launch(
        body,
        out=(jax.ShapeDtypeStruct(x.shape, x.dtype),),
        scratch=[],
        grid={"block": BLOCKS},
        warpgroups=1,
        interpret=True,
        in_place=in_place,
    )
    return run(added, x)[0]


@pytest.mark.catches("launch-in-place")
@pytest.mark.parametrize("in_place", [False, True])
def test_outputs_take_the_memory_of_inputs_where_told(in_place):
    found = jax.jit(lambda *a: twice_added(*a, in_place=in_place))(X[::-1].copy(), X)
    assert not races_found()
    np.testing.assert_array_equal(found, X[::-1] + X + in_place)


def test_who_gave_the_memory_keeps_the_values():
    """And a loop hands one call's result to the next."""
    given = jnp.asarray(X)
    step = jax.jit(lambda x: twice_added(jnp.ones_like(x), x, in_place=True))
    found = jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda _, x: step(x), x))(given)
    assert not races_found()
    np.testing.assert_array_equal(found, X + 6)
    np.testing.assert_array_equal(given, X)


def test_under_vmap_they_are_apart():
    both = jnp.stack([X, 2 * X])
    found = jax.jit(jax.vmap(lambda x: twice_added(jnp.ones_like(x), x, in_place=True)))(both)
    assert not races_found()
    np.testing.assert_array_equal(found, both + 1)
