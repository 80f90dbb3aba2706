"""A bias by relative position is its array of pairs, in values and gradients, tile by tile."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.pallas.attention import Mask, RelativeBias, attention, xla
from tests.oracle import assert_trees_close

B, S, N, KV, H, REACH = 2, 21, 4, 2, 8, 6
KEYS = jax.random.split(jax.random.key(5), 6)
MASK = Mask(causal=True, window=(15, 0))


def by_table(params, distance):
    """A learned number per head and clipped distance, and a slope per head."""
    table, slope = params["table"], params["slope"]
    at = jnp.clip(distance, -REACH, REACH) + REACH
    wide = slope.reshape(-1, *[1] * distance.ndim) * jnp.abs(distance)
    return jnp.take(table, at, axis=1) - wide


def params():
    return {
        "table": jax.random.normal(KEYS[0], (N, 2 * REACH + 1)),
        "slope": jax.random.uniform(KEYS[1], (N,)),
    }


def arrays():
    shapes = (B, S, N, H), (B, S, KV, H), (B, S, KV, H)
    return tuple(jax.random.normal(key, x) for key, x in zip(KEYS[2:5], shapes, strict=True))


def run(bias_of, mask, implementation, qkv, params):
    out, lse = attention(
        *qkv,
        mask=mask,
        biases=(bias_of(params), jax.random.normal(KEYS[5], (1, N, S, S))),
        soft_cap=3.0,
        return_lse=True,
        implementation=implementation,
    )
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse)), (out, lse)


def related(params):
    return RelativeBias(params=params, fn=by_table)


def of_pairs(places, params):
    """The same as an array `[b, n, s, s]`."""
    return jnp.moveaxis(by_table(params, places[:, :, None] - places[:, None]), 0, 1)


@pytest.mark.catches("relative-bias-of-places")
@pytest.mark.parametrize("places", ["along the row", "given"])
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_it_is_the_array_of_its_pairs(implementation, places, monkeypatch):
    monkeypatch.setattr(xla, "TILE", {"cpu": 8})
    where, mask = jnp.arange(S)[None], MASK
    if places == "given":
        where = jnp.stack([jnp.arange(S) * 2, jnp.arange(S) // 2])
        mask = mask.changed(q_positions=where, kv_positions=where)

    def gradients(bias_of, implementation):
        call = functools.partial(run, bias_of, mask, implementation)
        return jax.jit(jax.grad(call, (0, 1), has_aux=True))(arrays(), params())

    found = gradients(related, implementation)
    expected = gradients(functools.partial(of_pairs, where), "reference")
    assert_trees_close(found, expected, tolerance=2e-5)
    assert all(np.abs(x).max() > 0.1 for x in jax.tree.leaves(found[0][1]))


def test_no_array_of_all_pairs_is_made(monkeypatch):
    monkeypatch.setattr(xla, "TILE", {"cpu": 8})
    call = jax.grad(lambda p: jnp.sum(attention(*arrays(), mask=MASK, biases=(related(p),))))
    assert f",{S},{S}]" not in str(jax.make_jaxpr(call)(params()))


def test_it_is_refused_where_it_does_not_fit_and_where_no_kernel_has_it():
    few = jax.tree.map(lambda x: x[:2], params())
    with pytest.raises(ValueError, match=r"params \(2,\) have not the 4 query heads first"):
        attention(*arrays(), mask=MASK, biases=(related(few),))
    flat = RelativeBias(params=params(), fn=lambda params, distance: params["slope"])
    with pytest.raises(ValueError, match=r"fn makes \(4,\) of distances \(2, 3\)"):
        attention(*arrays(), mask=MASK, biases=(flat,))
    half = tuple(jnp.zeros((1, 8, N, 64), jnp.bfloat16) for _ in range(3))
    with pytest.raises(NotImplementedError, match="a RelativeBias is not available"):
        attention(*half, mask=MASK, biases=(related(params()),), implementation="interpret")
