"""A layer that loops, its transpose in two parts: the gradients of one, nothing done twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.layerwise import Layer
from tests.aot.executed import executed_flops

TURNS, ROWS, WIDTH = 3, 4, 8


def looping(policy):
    """Layers of two matrices, one of which is read again by the next turn's side."""

    def turn(carry, row):
        x, seen = carry
        hidden = jnp.tanh(x @ row["up"])
        out = x + hidden @ row["down"]
        return (out, seen + jnp.sum(hidden)), jnp.sum(row["down"] * seen)

    def apply(params, carry, side, number):
        body = turn if policy is None else jax.checkpoint(turn, policy=policy)
        (x, seen), told = jax.lax.scan(body, (carry * side, jnp.float32(number)), params)
        return x + seen, jnp.sum(told)

    return apply


@pytest.mark.catches("loop-in-one")
@pytest.mark.catches("loop-turned-round")
@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.nothing_saveable])
def test_a_loop_in_two_parts(policy):
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "up": jax.random.normal(keys[0], (TURNS, WIDTH, 2 * WIDTH)),
        "down": jax.random.normal(keys[1], (TURNS, 2 * WIDTH, WIDTH)),
    }
    x, by = jax.random.normal(keys[2], (ROWS, WIDTH)), jax.random.normal(keys[3], (ROWS, WIDTH))
    side, number = jnp.float32(2), jnp.int32(1)
    layer = Layer(looping(policy), params, x, side)
    _, kept = layer.forward(params, x, side, number)
    given, cotangent = (params, side, number, kept), (by, jnp.float32(1))
    want = layer.transpose(*given, cotangent)
    apart = layer.apart(loops=True)
    carry, _, pending = apart.input_gradient(*given, cotangent)
    found = apart.weight_gradient(*given, pending)
    np.testing.assert_allclose(carry, want.carry, rtol=1e-5)
    for name, right in want.params.items():
        np.testing.assert_allclose(found[name], right, rtol=1e-4, atol=1e-5, err_msg=name)

    def flops(fn, *args):
        return executed_flops(jax.jit(fn).lower(*args).compile().as_text())

    weights = flops(apart.weight_gradient, *given, pending)
    assert weights == 2 * ROWS * sum(x.size for x in params.values())
    together = flops(apart.input_gradient, *given, cotangent) + weights
    assert together == flops(layer.transpose, *given, cotangent)
