"""A bias by relative position travels around a ring, where none that is an array can."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.pallas.attention import Mask, RelativeBias
from tests.pallas.attention.test_relative import by_table
from tests.sharding.sequence.support import Layout, assert_close, operands, results, truth

HEADS, REACH = 4, 6
LAYOUTS = [
    Layout(ring=2, ulysses=2, tensor=2),
    Layout(ring=4, order="natural"),
    Layout(ring=2, scheme="all_gather"),
    Layout(ring=2, scheme="self_attention"),
]


def with_bias(attend):
    """Slopes stand for the numbers of each head here: the first are its slope."""

    def run(q, k, v, numbers, sinks, mask):
        params = {"slope": numbers[:HEADS], "table": numbers[HEADS:].reshape(HEADS, -1)}
        biases = (RelativeBias(params=params, fn=by_table),)
        return attend(q, k, v, None, sinks, mask, biases=biases)

    return run


@pytest.mark.catches("ring-bias-of-places")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_scheme_has_it_with_its_gradient(layout):
    segments = jnp.asarray(np.repeat([0, 1, -1], [20, 3, 1]))[None]
    mask = Mask(causal=True, q_segments=segments, kv_segments=segments)
    q, k, v, _, sinks = operands(heads=HEADS, b=1, s=24, sinks=True)
    numbers = jax.random.uniform(jax.random.key(9), (HEADS * (2 * REACH + 2),))
    arrays = q, k, v, numbers, sinks
    found = results(with_bias(layout), *arrays, mask=mask)
    assert_close(found, results(with_bias(truth), *arrays, mask=mask))
    assert jnp.abs(found["gradients"][3]).max() > 0.01
