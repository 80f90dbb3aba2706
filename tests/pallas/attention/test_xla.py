"""What surrounds the blockwise form: devices, loops, remat, vmap, memory, tiles left out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from colossax.pallas.attention import Mask, attention, dense, xla

S = 32


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(xla, "TILE", {"cpu": 8})


def operands(b=2, n=4, kv_heads=2, h=8, s=S):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (b, s, n, h), (b, s, kv_heads, h), (b, s, kv_heads, h)
    return tuple(jax.random.normal(r, x) for r, x in zip(keys, shapes, strict=True))


def packed(b):
    ids = np.sort(np.random.default_rng(0).integers(0, 3, (b, S)), axis=1).astype(np.int32)
    ids[:, -3:] = -1
    return Mask(causal=True, q_segments=jnp.asarray(ids), kv_segments=jnp.asarray(ids))


def loss(q, k, v, mask, slopes=None, implementation="xla"):
    out, lse = attention(
        q,
        k,
        v,
        mask=mask,
        alibi_slopes=slopes,
        return_lse=True,
        implementation=implementation,
    )
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(jnp.isneginf(lse), 0, jnp.cos(lse)))


def close(found, expected):
    for f, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(f, e, rtol=1e-5, atol=1e-5)


def test_inside_shard_map(devices):
    """Batch over four devices, heads over two; slopes are split, the mask follows the batch."""
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    arrays, mask, slopes = operands(b=4), packed(4), jnp.asarray([0.5, 0.2, 0.1, 0.05])
    heads, rows = PartitionSpec("data", None, "tensor"), PartitionSpec("data")

    def local(q, k, v, mask, slopes):
        return attention(q, k, v, mask=mask, alibi_slopes=slopes, return_lse=True)

    split = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(heads, heads, heads, rows, PartitionSpec("tensor")),
        out_specs=(heads, PartitionSpec("data", "tensor")),
    )

    def on_the_mesh(q, k, v, slopes):
        out, lse = split(q, k, v, mask, slopes)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(jnp.isneginf(lse), 0, jnp.cos(lse)))

    placed = [jax.device_put(x, NamedSharding(mesh, heads)) for x in arrays]
    argnums = (0, 1, 2, 3)
    found = jax.jit(jax.value_and_grad(on_the_mesh, argnums))(*placed, slopes)

    def on_one_device(q, k, v, slopes):
        return loss(q, k, v, mask, slopes, "reference")

    expected = jax.jit(jax.value_and_grad(on_one_device, argnums))(*arrays, slopes)
    close(found, expected)


def test_gradients_of_what_all_devices_share(devices):
    """Whole kv heads on every device: their gradient sums over the devices of the query heads."""
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    arrays = operands(kv_heads=1)
    heads, whole = PartitionSpec(None, None, "tensor"), PartitionSpec()
    split = jax.shard_map(
        lambda q, k, v: attention(q, k, v, mask=Mask(causal=True)),
        mesh=mesh,
        in_specs=(heads, whole, whole),
        out_specs=heads,
    )

    def alone(q, k, v):
        return attention(q, k, v, mask=Mask(causal=True), implementation="reference")

    def gradient(f):
        return jax.jit(jax.grad(lambda *x: jnp.sum(jnp.sin(f(*x))), (0, 1, 2)))(*arrays)

    close(gradient(split), gradient(alone))


def test_inside_checkpointed_layers_of_a_scan():
    mask = packed(2)
    q, k, v = operands()
    scales = jnp.asarray([1.0, 0.5, 2.0])

    def run(q, k, v, implementation):
        @jax.checkpoint
        def layer(x, scale):
            return attention(x, k * scale, v, mask=mask, implementation=implementation), None

        return jnp.sum(jnp.sin(jax.lax.scan(layer, q, scales)[0]))

    found, expected = (
        jax.jit(jax.grad(run, (0, 1, 2)), static_argnums=3)(q, k, v, name)
        for name in ("xla", "reference")
    )
    close(found, expected)


def test_under_vmap():
    """Over arrays and over masks, whose tiles then differ from one row to the next."""
    arrays = operands(b=3)
    mask = packed(3)
    deep = jax.tree.map(lambda x: x[:, None], (*arrays, mask))
    gradient = jax.grad(loss, (0, 1, 2))
    found, expected = jax.jit(jax.vmap(gradient))(*deep), jax.jit(gradient)(*arrays, mask)
    close(jax.tree.map(lambda x: x[:, 0], found), expected)


@pytest.mark.parametrize(
    "mask, per_row",
    [
        (Mask(causal=True), [1, 2, 3, 4]),
        (Mask(causal=True, window=(3, 0)), [1, 2, 2, 2]),
        (Mask(causal=True, window=(8, 0)), [1, 2, 2, 2]),
        (Mask(causal=True, window=(9, 0)), [1, 2, 3, 3]),
        (
            Mask(
                causal=True,
                q_segments=jnp.repeat(jnp.asarray([[0, 1, -1, -1]]), 8, axis=1),
                kv_segments=jnp.repeat(jnp.asarray([[0, 1, -1, -1]]), 8, axis=1),
            ),
            [1, 1, 0, 0],
        ),
        (Mask(kv_valid=jnp.arange(32)[None] < 9), [2, 2, 2, 2]),
    ],
)
def test_key_tiles_that_nobody_sees_are_not_visited(mask, per_row):
    first, last = xla.bounds(mask, *xla.describe(xla.Tiles(q_tile=8, kv_tile=8), mask, S, S))
    assert np.maximum(last - first, 0).tolist() == per_row
    seen = np.asarray(dense(mask, S, S)).any(axis=(0, 1)).reshape(4, 8, 4, 8).any(axis=(1, 3))
    tiles = np.arange(4)
    visited = (np.asarray(first)[:, None] <= tiles) & (tiles < np.asarray(last)[:, None])
    assert not (seen & ~visited).any()


def temporary_bytes(implementation, s):
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.eval_shape(lambda: operands(s=s))]

    def total(q, k, v):
        return jnp.sum(attention(q, k, v, mask=Mask(causal=True), implementation=implementation))

    compiled = jax.jit(jax.grad(total, (0, 1, 2))).lower(*shapes).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_memory_grows_with_the_sequence_not_its_square(monkeypatch):
    monkeypatch.setattr(xla, "TILE", {"cpu": 64})
    short, long = (temporary_bytes("xla", s) for s in (1024, 4096))
    assert long < 4.5 * short
    # One row of scores alone would take b n s^2 4 bytes.
    assert long < 2 * 4 * 4096 * 4096 * 4 / 20
    assert temporary_bytes("reference", 4096) > 2 * 4 * 4096 * 4096 * 4


def test_residuals_are_inputs_output_and_lse():
    q, k, v = operands()
    _, pull = jax.vjp(lambda q, k, v: attention(q, k, v, mask=Mask(causal=True)), q, k, v)
    kept = sorted(x.size for x in jax.tree.leaves(pull) if hasattr(x, "size") and x.size > 1)
    assert kept == sorted([q.size, k.size, v.size, q.size, 2 * 4 * S])
