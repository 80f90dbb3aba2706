"""Latent attention: one device against a loop over heads, and any mesh against one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.config import Plan
from colossax.layerwise import LayerState
from colossax.nn import (
    LatentAttention,
    LatentConfig,
    LatentShape,
    RopeConfig,
    Side,
    describe,
    initialise,
    rope_tables,
    rotate,
)
from colossax.sharding import use
from tests.oracle import assert_trees_close

B, S, D, N = 4, 16, 24, 4
SIZES = LatentConfig(kv_rank=16, q_rank=8, nope_dim=6, rope_dim=4, v_dim=10, scale=1.3)
ROPE = RopeConfig(interleaved=True)
PLANS = {
    "fsdp, tensor": Plan(mesh={"fsdp": 2, "tensor": 4}),
    "data, ring": Plan(mesh={"data": 2, "ring": 4}),
    "ulysses, tensor": Plan(mesh={"ulysses": 2, "tensor": 2, "expert": 2}),
    "ring, ulysses": Plan(mesh={"ring": 2, "ulysses": 2, "fsdp": 2}),
}


def made(rngs):
    shape = LatentShape(embed=D, heads=N, sizes=SIZES, interleaved=True)
    return LatentAttention(shape, rngs=rngs, std=0.4, out_std=0.4)


def tables():
    return rope_tables(jnp.tile(jnp.arange(S), (B, 1)), ROPE, SIZES.rope_dim)


@functools.cache
def run(plan=None):
    """Output, and gradients of a sum of it, of the parameters and the input."""
    chosen = Plan() if plan is None else PLANS[plan]
    bound = chosen.bind(jax.devices()[: int(np.prod(list(chosen.mesh.values()), initial=1))])
    with use(bound):
        spec = describe(made)
    params = initialise(spec, bound, jax.random.key(1))
    x = jax.random.normal(jax.random.key(2), (B, S, D))

    def total(params, x):
        with use(bound):
            out, _, _ = spec.merge(params).mix(x, Side(rope=tables()), LayerState(index=0, row=0))
        return jnp.sum(jnp.sin(out)), out

    grads, out = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(params, x)
    return jax.device_get((out, *grads)), jax.device_get(params), np.asarray(x)


def by_loop(params, x):
    """Head by head, with keys and values of its own."""
    w = {name: params[name]["w"] for name in ("q_down", "q_up", "kv_down", "kv_up", "o")}

    def normed(a, name):
        return a / np.sqrt(np.mean(a**2, axis=-1, keepdims=True) + 1e-6) * params[name]["scale"]

    def turned(a):
        given = jnp.asarray(a[:, :, None])
        return np.asarray(rotate(given, tables(), interleaved=True))[:, :, 0]

    rank, nope = SIZES.kv_rank, SIZES.nope_dim
    queries, down = normed(x @ w["q_down"], "q_norm"), x @ w["kv_down"]
    latent, shared = normed(down[..., :rank], "kv_norm"), turned(down[..., rank:])
    later = np.triu(np.ones((S, S), bool), 1)
    out = 0
    for n in range(N):
        q, kv = queries @ w["q_up"][:, n], latent @ w["kv_up"][:, n]
        q = np.concatenate([q[..., :nope], turned(q[..., nope:])], axis=-1)
        k = np.concatenate([kv[..., :nope], shared], axis=-1)
        logits = 1.3 / np.sqrt(10) * q @ k.swapaxes(-1, -2)
        share = np.exp(np.where(later, -np.inf, logits))
        out = out + share / share.sum(axis=-1, keepdims=True) @ kv[..., nope:] @ w["o"][n]
    return out


@pytest.mark.catches("latent-softmax-scale")
def test_it_is_a_loop_over_heads():
    (out, *_), params, x = run()
    np.testing.assert_allclose(out, by_loop(params, x), atol=2e-5)


@pytest.mark.sweep
@pytest.mark.parametrize("plan", PLANS)
def test_a_mesh_changes_neither_output_nor_gradients(plan):
    assert_trees_close(run(plan)[0], run()[0], tolerance=2e-5)
