"""Sublayers of one's own that keep other things of tokens than keys and values."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from colossax.nn import CacheArray, CacheSpec, Linear, run_recurrence


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
