"""Attention to a cache in a region of the plan, split over heads, is that of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from colossax.aot import collectives
from colossax.config import Plan
from colossax.pallas import attention as local
from colossax.sharding import CACHE_DIMS, attend_cache, cache_spec, resolve, use

LAYERS, SLOTS, TOKENS, H, HV = 2, 24, 5, 8, 6
OPTIONS = {"window": (4, 0), "scale": 0.4, "soft_cap": 3.0}


def operands(heads, kv_heads):
    """Five tokens after seven that the cache holds, in two layers."""
    keys = iter(jax.random.split(jax.random.key(0), 6))
    q, k, v = (
        jax.random.normal(next(keys), (TOKENS, n, size))
        for n, size in ((heads, H), (kv_heads, H), (kv_heads, HV))
    )
    cache = {
        name: jax.random.normal(next(keys), (LAYERS, 1, SLOTS, kv_heads, size))
        for name, size in (("k", H), ("v", HV))
    }
    return q, k, v, cache, jax.random.uniform(next(keys), (heads,))


def layers(attend, q, k, v, cache, slopes):
    """A scan of two layers, the last token being padding."""
    where = {"position": jnp.arange(7, 7 + TOKENS), "slot": jnp.arange(7, 7 + TOKENS)}
    where["seat"] = jnp.where(jnp.arange(TOKENS) < TOKENS - 1, 0, -1)

    def layer(carry, index):
        total, cache = carry
        options = {**where, **OPTIONS, "alibi_slopes": slopes}
        new = {"k": k, "v": v * (1 + index)}
        out, cache = attend(q * (1 + index), new, cache, index, **options)
        return (total + out, cache), None

    start = (jnp.zeros((*q.shape[:2], HV)), cache)
    return jax.lax.scan(layer, start, jnp.arange(LAYERS))[0]


CASES = {
    "kv heads split": ({"tensor": 4}, 8, 4),
    "part of a group each": ({"tensor": 8}, 8, 2),
    "groups across devices": ({"fsdp": 2, "tensor": 4}, 12, 2),
}


@pytest.mark.catches("cache-region-heads")
@pytest.mark.parametrize("name", CASES)
def test_every_device_reads_the_heads_that_it_has(name, devices):
    """The values are those of one device, and nothing is sent where operands lie as rules say."""
    mesh, heads, kv_heads = CASES[name]
    arrays = operands(heads, kv_heads)
    bound = Plan(mesh=mesh).bind(devices[: int(np.prod(list(mesh.values())))])
    expected = layers(local.attend_cache, *arrays)

    def run(*arrays):
        with use(bound):
            return layers(attend_cache, *arrays)

    def spec(x, dim):
        return resolve(bound, "activations", (None, dim, None), x.shape, name="test")

    q, k, v, cache, slopes = arrays
    specs = (
        *(spec(x, dim) for x, dim in ((q, "heads"), (k, "kv_heads"), (v, "kv_heads"))),
        {name: cache_spec(bound, x.shape, CACHE_DIMS) for name, x in cache.items()},
        PartitionSpec(spec(q, "heads")[1]),
    )
    placed = jax.tree.map(functools.partial(NamedSharding, bound.mesh), specs)
    out = (placed[0], placed[3])
    compiled = jax.jit(run, in_shardings=placed, out_shardings=out).lower(*arrays).compile()
    found = compiled(*jax.device_put(arrays, placed))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-6), found, expected)
    assert not collectives(compiled.as_text(), bound.mesh)
