"""Flax's own Gemma example on any mesh, untouched: what `boost` finds of it, and its losses."""

import functools
import math

import jax
import numpy as np
import optax
import pytest

from colossax import Plan, boost
from tests import gemma

pytestmark = pytest.mark.outside

MIXED, FSDP = {"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 8}
HEADS = {"grouped": 2, "all its own": 4, "one for all": 1}
"""Heads of keys and values."""


def boosted(mesh, kv_heads):
    return boost(
        gemma.maker(num_kv_heads=kv_heads),
        optax.adamw(1e-3),
        gemma.loss,
        Plan(mesh=mesh),
        devices=jax.devices()[: math.prod(mesh.values())],
    )


@functools.cache
def trained(mesh, kv_heads):
    """Losses of three steps; the share that a device holds of each parameter, by path."""
    state, step = boosted(dict(mesh), kv_heads)
    found = []
    for _ in range(3):
        state, metrics = step(state, gemma.batch(16))
        found.append(float(metrics["loss"]))
    leaves = jax.tree.leaves(state["params"])
    paths = [info.path for info in jax.tree.leaves(step.spec.infos)]
    return found, dict(zip(paths, leaves, strict=True))


def on(mesh, kv_heads=2):
    return trained(tuple(mesh.items()), kv_heads)


def shards(array):
    """Into how many parts each dim is split."""
    held = array.sharding.shard_shape(array.shape)
    return tuple(n // part for n, part in zip(array.shape, held, strict=True))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("mesh", [MIXED, FSDP], ids=["mixed", "fsdp"])
def test_it_trains_as_on_one_device(mesh, heads):
    one, found = (on(m, HEADS[heads])[0] for m in ({"data": 1}, mesh))
    np.testing.assert_allclose(found, one, rtol=1e-5)
    assert found[-1] < found[0] - 0.1


def test_heads_the_mlp_and_the_vocabulary_are_split():
    params = on(MIXED)[1]
    assert shards(params["embedder/embedding"]) == (2, 2)
    for layer in range(3):
        block = f"layers/{layer}"
        assert shards(params[f"{block}/attn/q_einsum/kernel"]) == (2, 2, 1)
        assert shards(params[f"{block}/attn/kv_einsum/kernel"]) == (1, 2, 2, 1)
        assert shards(params[f"{block}/attn/attn_vec_einsum/kernel"]) == (2, 1, 2)
        assert shards(params[f"{block}/mlp/gate_proj/kernel"]) == (2, 2)
        assert shards(params[f"{block}/mlp/down_proj/kernel"]) == (2, 2)
    fused = on(MIXED, 4)[1]["layers/0/attn/qkv_einsum/kernel"]
    assert shards(fused) == (1, 2, 2, 1)


@pytest.mark.parametrize("mesh", [MIXED, FSDP], ids=["mixed", "fsdp"])
def test_only_scales_of_norms_stay_whole(mesh):
    params = on(mesh)[1]
    whole = {path for path, array in params.items() if array.sharding.is_fully_replicated}
    assert whole and all(path.endswith("norm/scale") for path in whole)
    total = sum(array.nbytes for array in params.values())
    assert sum(params[path].nbytes for path in whole) < 0.02 * total
    parts = math.prod(n for axis, n in mesh.items() if axis != "data")
    split = [array for path, array in params.items() if path not in whole]
    assert all(math.prod(shards(array)) == parts for array in split)
