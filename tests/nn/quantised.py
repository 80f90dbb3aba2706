"""A weight in int8 with scales that does not learn, beside a narrow pair that does."""

import jax
import jax.numpy as jnp
from flax import nnx

from colossax.models import LlamaConfig, maker
from colossax.nn import param, weight_of, with_weights
from colossax.sharding import Dense
from tests.nn.wrapping import Adapted

CONFIG = LlamaConfig(vocab=64, embed=32, layers=3, heads=4, kv_heads=2, mlp=48, max_seq=16)


class Quantised(nnx.Module):
    """Of a matrix: int8, and the scale of each of its columns; or floats of the same values."""

    def __init__(self, module, *, as_floats):
        self.dims, inner = module.dims, module.contract
        dense = module.held[...]
        scale = jnp.max(jnp.abs(dense), axis=tuple(range(inner))) / 127
        self.as_floats = as_floats
        codes = jnp.round(dense / scale)
        if as_floats:
            self.values = param(codes * scale, self.dims, learns=False)
        else:
            self.codes = param(codes, self.dims, learns=False, dtype="int8")
            self.scales = param(scale, self.dims[inner:], learns=False)

    @property
    def weight(self):
        if self.as_floats:
            return weight_of(self.values, self.dims)
        # On each device's own part, so that what is gathered is as of floats.
        return Dense(self.codes[...].astype(jnp.float32) * self.scales[...], self.dims)


class LowRank(nnx.Module):
    """A matrix plus the product of two narrow ones."""

    def __init__(self, module, base, rngs, rank=2):
        self.dims, inner = module.dims, module.contract
        self.base, shape = base, module.weight.shape
        keys = jax.random.split(rngs.params())
        down = jax.random.normal(keys[0], (*shape[:inner], rank)) / 8
        self.down = param(down, (*module.dims[:inner], None))
        up = jax.random.normal(keys[1], (rank, *shape[inner:])) / 8
        self.up = param(up, (None, *module.dims[inner:]))

    @property
    def weight(self):
        inner = len(self.down.shape) - 1
        return Adapted(
            weight_of(self.base, self.dims),
            weight_of(self.down, (*self.dims[:inner], None)),
            weight_of(self.up, (None, *self.dims[inner:])),
        )


def quantised(*, as_floats=False, config=CONFIG):
    """A Llama some matrices of whose layers are quantised, with a narrow pair beside each."""

    def make(name, module, rngs):
        if name not in ("attn/q", "attn/o", "mlp/down"):
            return None
        return LowRank(module, Quantised(module, as_floats=as_floats), rngs)

    return with_weights(maker(config), make)
