"""The same Llama in plain JAX: unrolled layers, einsums, `value_and_grad` and Optax.

What a careful person writes in an afternoon without a framework; no sharding, no packing, no
remat, no loss weights.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a Llama."""

    vocab: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int


def init(sizes: Sizes, key: jax.Array) -> dict[str, Any]:
    """Parameters, normal with deviation 0.02, norms one."""
    d, h, f = sizes.embed, sizes.head_dim, sizes.mlp
    shapes = {
        "q": (d, sizes.heads, h),
        "k": (d, sizes.kv_heads, h),
        "v": (d, sizes.kv_heads, h),
        "o": (sizes.heads, h, d),
        "gate": (d, f),
        "up": (d, f),
        "down": (f, d),
    }

    def matrix(i: int, shape: tuple[int, ...]) -> jax.Array:
        return 0.02 * jax.random.normal(jax.random.fold_in(key, i), shape, jnp.float32)

    def layer(i: int) -> dict[str, jax.Array]:
        matrices = {n: matrix(100 * i + j, s) for j, (n, s) in enumerate(shapes.items())}
        return {**matrices, "norm1": jnp.ones(d), "norm2": jnp.ones(d)}

    return {
        "embed": matrix(90_000, (sizes.vocab, d)),
        "head": matrix(90_001, (d, sizes.vocab)),
        "norm": jnp.ones(d),
        "layers": [layer(i) for i in range(sizes.layers)],
    }


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * scale


def rope(x: jax.Array) -> jax.Array:
    s, h = x.shape[1], x.shape[-1]
    freqs = 10_000.0 ** (-jnp.arange(0, h, 2) / h)
    angles = jnp.arange(s)[:, None, None] * freqs
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def block(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    y = rms_norm(x, p["norm1"])
    q = rope(jnp.einsum("bsd,dnh->bsnh", y, p["q"]))
    k = rope(jnp.einsum("bsd,dkh->bskh", y, p["k"]))
    v = jnp.einsum("bsd,dkh->bskh", y, p["v"])
    out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + jnp.einsum("bsnh,nhd->bsd", out, p["o"])
    y = rms_norm(x, p["norm2"])
    return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]


def loss(params: dict[str, Any], tokens: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean next-token cross entropy."""
    x = params["embed"][tokens]
    for layer in params["layers"]:
        x = block(layer, x)
    logits = rms_norm(x, params["norm"]) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def make_step(optimizer: optax.GradientTransformation):
    """`(params, opt_state, tokens, targets) -> (params, opt_state, loss)`, jitted, donated."""

    def step(params, opt_state, tokens, targets):
        value, grads = jax.value_and_grad(loss)(params, tokens, targets)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return jax.jit(step, donate_argnums=(0, 1))
