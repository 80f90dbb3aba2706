"""Sublayers of one's own that keep other things of tokens than keys and values."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from colossax.nn import CacheArray, CacheSpec, Linear, param, rotate, run_recurrence
from colossax.sharding import attend_cache, attention


class GatedRecurrence(nnx.Module):
    """`h = a h + (1 - a) v`, one number per channel: a state for each sequence, and no slots."""

    def __init__(self, embed, width, *, rngs, std=0.3):
        self.width = width
        self.gate = Linear((embed, width), ("embed", "mlp"), rngs=rngs, std=std)
        self.up = Linear((embed, width), ("embed", "mlp"), rngs=rngs, std=std)
        self.down = Linear((width, embed), ("mlp", "embed"), rngs=rngs, std=std)

    def cache_spec(self, *, layers, seats, slots, chunk=None):
        shape, dims = (layers, seats, self.width), ("layers", None, "mlp")
        state = CacheArray(shape=shape, dims=dims, role="accumulation")
        return CacheSpec(arrays={"state": state}, kind="sequence")

    def mix(self, x, side, state):
        log_a, v = jax.nn.log_sigmoid(self.gate(x)), self.up(x)
        if side.flat is None:
            return self.down(self._whole(log_a, v)), state, {}
        given = {"log_a": log_a[0], "v": v[0]}
        out, states = run_recurrence(self._step, given, state.carried, state.row, side.flat)
        return self.down(out[None]), dataclasses.replace(state, carried=states), {}

    @staticmethod
    def _step(before, given):
        a = jnp.exp(given["log_a"])
        after = a * before["state"] + (1 - a) * given["v"]
        return {"state": after}, after

    @staticmethod
    def _whole(log_a, v):
        """Every token's sum over those before it, all at once."""
        total = jnp.cumsum(log_a, axis=1)
        far = total[:, :, None] - total[:, None]
        seen = jnp.tril(jnp.ones(far.shape[1:3], bool))[None, :, :, None]
        weights = jnp.where(seen, jnp.exp(jnp.where(seen, far, 0)), 0)
        return jnp.sum(weights * ((1 - jnp.exp(log_a)) * v)[:, None], axis=2)


LATENT_DIMS = ("layers", None, None, "latent")


class LatentAttention(nnx.Module):
    """Attention that keeps one latent and one rotated key a token, for all of its heads.

    Keys and values are made from the latent; from the cache the map to keys is applied to queries.
    Source: DeepSeek-AI 2024, DeepSeek-V2.
    """

    def __init__(self, embed, heads, *, latent, rope, plain, value, rngs, std=0.3):
        self.sizes = {"latent": latent, "rope": rope}
        self.latent, self.plain = latent, plain
        dims = ("embed", "heads", "head_dim")
        self.q = Linear((embed, heads, plain + rope), dims, rngs=rngs, std=std)
        self.down = Linear((embed, latent + rope), ("embed", None), rngs=rngs, std=std)
        self.to_key, self.to_value = (
            param(jax.random.normal(rngs.params(), (latent, heads, n)) * std, (None, *dims[1:]))
            for n in (plain, value)
        )
        self.o = Linear(
            (heads, value, embed), ("heads", "head_dim", "embed"), rngs=rngs, contract=2, std=std
        )

    def cache_spec(self, *, layers, seats, slots, chunk=None):
        shape = (layers, seats, slots)
        arrays = {
            name: CacheArray(shape=(*shape, size), dims=LATENT_DIMS)
            for name, size in self.sizes.items()
        }
        return CacheSpec(arrays=arrays)

    def mix(self, x, side, state):
        q_plain, q_rope = jnp.split(self.q(x), [self.plain], axis=-1)
        latent, rope = jnp.split(self.down(x), [self.latent], axis=-1)
        q_rope, rope = (
            rotate(q_rope, side.rope),
            rotate(rope[:, :, None], side.rope)[:, :, 0],
        )
        if side.flat is None:
            out = self._whole(q_plain, q_rope, latent, rope, side)
        else:
            out, state = self._cached(q_plain, q_rope, latent, rope, side.flat, state)
        return self.o(out), state, {}

    def _whole(self, q_plain, q_rope, latent, rope, side):
        """With keys and values of every head."""
        keys = jnp.einsum("bsr,rnh->bsnh", latent, self.to_key[...])
        values = jnp.einsum("bsr,rnh->bsnh", latent, self.to_value[...])
        ropes = jnp.broadcast_to(rope[:, :, None], (*keys.shape[:3], rope.shape[-1]))
        q, k = jnp.concatenate([q_plain, q_rope], -1), jnp.concatenate([keys, ropes], -1)
        return attention(q, k, values, mask=side.mask(None))

    def _cached(self, q_plain, q_rope, latent, rope, flat, state):
        absorbed = jnp.einsum("tnh,rnh->tnr", q_plain[0], self.to_key[...])
        q = jnp.concatenate([absorbed, q_rope[0]], -1)
        out, cache = attend_cache(
            q,
            {"latent": latent[0], "rope": rope[0]},
            state.carried,
            state.row,
            dims=dict.fromkeys(self.sizes, LATENT_DIMS),
            seat=flat.seat,
            position=flat.position,
            slot=flat.slot,
            scale=(q_plain.shape[-1] + q_rope.shape[-1]) ** -0.5,
            read=_one_head,
        )
        values = jnp.einsum("tnr,rnh->tnh", out, self.to_value[...])
        return values[None], dataclasses.replace(state, carried=cache)


def _one_head(held):
    keys = jnp.concatenate([held["latent"], held["rope"]], -1)
    return keys[:, None], held["latent"][:, None]
