"""Attention and its gradients by the kernels at every head size there is, against the formula."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.pallas.attention import Mask, attention
from colossax.pallas.attention.mosaic_gpu.shapes import HEAD_SIZES
from tests.cases import quick_first
from tests.pallas.places import everywhere, no_races

MASK = Mask(causal=True, window=(60, 0))
QUERIES, KEYS, HEADS, KV_HEADS = 100, 70, 4, 2


@everywhere
@pytest.mark.catches("kernel-split-heads")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("sizes", quick_first([(sizes,) for sizes in HEAD_SIZES], [((96, 96),)]))
def test_it_is_the_formula(sizes, dtype, place):
    rng = np.random.default_rng(0)
    shapes = [(QUERIES, HEADS, sizes[0]), (KEYS, KV_HEADS, sizes[0]), (KEYS, KV_HEADS, sizes[1])]
    given = [jnp.asarray(rng.normal(size=(1, *shape)), dtype) for shape in shapes]
    dout = jnp.asarray(rng.normal(size=(1, QUERIES, HEADS, sizes[1])), dtype)

    def both(q, k, v, dout, implementation):
        call = functools.partial(attention, mask=MASK, implementation=implementation)
        out, pull = jax.vjp(call, q, k, v)
        return out, *pull(dout)

    both = jax.jit(both, static_argnums=4)
    found = both(*given, dout, place)
    assert no_races(place)
    expected = both(*(x.astype(jnp.float32) for x in (*given, dout)), "reference")
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        assert np.linalg.norm(np.asarray(one, np.float32) - other) < 5e-3 * np.linalg.norm(other)
