"""The table of optimizers, and what its tests do with each."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from colossax.optim import (
    adafactor,
    adamw,
    adamw_8bit,
    came,
    galore,
    lamb,
    lars,
    lion,
    muon,
    sgd,
)

LAYERS, EXPERTS, STEPS = 2, 2, 4
SHAPES = {"w": (8, 16), "b": (16,), "norm": (8,)}
DIMS = {"w": ("embed", "mlp"), "b": ("mlp",), "norm": ("embed",)}

OPTIMIZERS = {
    "adamw": adamw(0.1),
    "adamw bf16 moment": adamw(0.1, moment_dtype=jnp.bfloat16),
    "adamw bf16 moments": adamw(0.1, moment_dtype=jnp.bfloat16, second_moment_dtype=jnp.bfloat16),
    "sgd": sgd(0.1, weight_decay=0.2),
    "sgd momentum": sgd(0.1, momentum=0.9),
    "lamb": lamb(0.1),
    "lamb all": lamb(0.1, adapt_all=True),
    "lamb bf16 moments": lamb(0.1, second_moment_dtype=jnp.bfloat16),
    "lamb clamped": lamb(0.1, bounds=(0.5, 2.0)),
    "lars": lars(5.0, weight_decay=0.1),
    "lion": lion(0.1),
    "lion bf16 moment": lion(0.1, moment_dtype=jnp.bfloat16),
    "adafactor": adafactor(0.1, weight_decay=0.2),
    "adafactor momentum": adafactor(0.1, momentum=0.9, least_scale=None, weight_decay=0.2),
    "came": came(0.1, weight_decay=0.2),
    "muon": muon(0.1),
    "galore": galore(0.1, rank=3, interval=2),
    "galore 8 bits": galore(0.1, rank=3, interval=2, state="8bit"),
    "adamw 8 bits": adamw_8bit(0.1),
    "lars all": lars(5.0, adapt_all=True, nesterov=True, eps=1e-3),
}


def draw(seed, shape, scale=1.0):
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


EXACT = ("adamw", "sgd", "lion")
"""First words of those that take no norm, mean or product of matrices: the same to the bit."""


@functools.cache
def unit(layer, expert, seed):
    """Parameters or gradients of one expert of one layer; each of another size."""
    scale = 1.0 + 3 * layer + 7 * expert
    return {name: draw([seed, layer, expert], SHAPES[name], scale) for name in SHAPES}


def unrolled(seed):
    return {f"{i}/{j}": unit(i, j, seed) for i in range(LAYERS) for j in range(EXPERTS)}


def stacked(tree):
    """`[layers, experts, ...]` leaves from an unrolled tree."""
    rows = [
        jax.tree.map(lambda *x: np.stack(x), *(tree[f"{i}/{j}"] for j in range(EXPERTS)))
        for i in range(LAYERS)
    ]
    return jax.tree.map(lambda *x: np.stack(x), *rows)


def run(optimizer, params, gradients):
    """Parameters and state after a step for each gradient."""

    @jax.jit
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(optimizer.init)(params)
    for grads in gradients:
        params, state = step(params, state, grads)
    return params, state


def assert_close(found, wanted, rtol=1e-6):
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True
    ):
        message = jax.tree_util.keystr(path)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol, err_msg=message)
