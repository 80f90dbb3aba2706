"""A state of each row from attention of one learned query."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from colossax.nn.attention import Attention
from colossax.nn.block import MLP
from colossax.nn.config import DecoderConfig
from colossax.nn.decoder.layers import make_norm
from colossax.nn.decoder.shapes import cross_shape
from colossax.nn.module import param
from colossax.sharding import constrain, gather_weight, linears


class AttentionPool(nnx.Module):
    """`y + mlp(norm(y))` of `y = attention(probe, hidden)`: a learned query, rows alone.

    The query is one, so scores are written out: `heads` numbers of each token. Devices that share a
    row each make the part of its tokens, and sum up.

    Source: Lee et al. 2019, Set Transformer; Zhai et al. 2022, Scaling Vision Transformers.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.probe = param(
            jax.random.normal(rngs.params(), (config.embed,), jnp.float32) * config.init_std,
            ("embed",),
        )
        self.attn = Attention(cross_shape(config), rngs=rngs, std=config.init_std)
        self.norm = make_norm(config)
        self.mlp = MLP(
            config.embed,
            config.mlp,
            rngs=rngs,
            activation=config.activation,
            gated=config.gated,
            bias=config.mlp_bias,
            std=config.init_std,
        )

    def __call__(self, hidden: Float[Array, "b s d"]) -> Float[Array, "b 1 d"]:
        """Of each row, in the dtype of `hidden`."""
        probe = gather_weight(self.probe[...], ("embed",), dtype=hidden.dtype)
        row = jnp.broadcast_to(probe, (hidden.shape[0], 1, probe.shape[0]))
        (query,) = linears(constrain(row, "batch", None, "embed"), (self.attn.q.map,))
        y = self.attn.o(self._mixed(query, hidden))
        return y + self.mlp(self.norm(y))

    def _mixed(self, query: Float[Array, "b 1 n h"], hidden: Any) -> Float[Array, "b 1 n h"]:
        keys, values = linears(hidden, (self.attn.k.map, self.attn.v.map))
        scale = query.shape[-1] ** -0.5
        scores = jnp.einsum("bqnh,bsnh->bnqs", query, keys, preferred_element_type=jnp.float32)
        shares = jax.nn.softmax(scores * scale, axis=-1).astype(hidden.dtype)
        mixed = jnp.einsum("bnqs,bsnh->bqnh", shares, values, preferred_element_type=jnp.float32)
        return mixed.astype(hidden.dtype)
