"""A state of each row from attention of one learned query."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from colossax.nn.attention import Attention
from colossax.nn.block import ACTIVATIONS
from colossax.nn.config import DecoderConfig
from colossax.nn.decoder.layers import make_norm
from colossax.nn.decoder.shapes import cross_shape
from colossax.nn.layers import Linear
from colossax.nn.module import param
from colossax.sharding import constrain, gather_weight, linears


class AttentionPool(nnx.Module):
    """`y + down(act(up(norm(y))))` of `y = attention(probe, hidden)`, the probe a learned query.

    The query is one, so scores are written out: `heads` numbers of each token. Devices that share a
    row each make the part of its tokens, and sum up.

    Cost: keys and values of each token, 4 b s d^2 FLOPs, and an MLP of each row.
    Source: Lee et al. 2019, Set Transformer; Zhai et al. 2022, Scaling Vision Transformers.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        std = config.init_std
        probe = jax.random.normal(rngs.params(), (config.embed,), jnp.float32)
        self.probe = param(probe * std, ("embed",))
        self.attn = Attention(cross_shape(config), rngs=rngs, std=std, out_std=std)
        self.norm = make_norm(config)
        self.activation = config.activation
        width = (config.embed, config.mlp), ("embed", "mlp")
        bias = config.mlp_bias
        self.up = Linear(*width, rngs=rngs, bias=bias, std=std)
        self.down = Linear(width[0][::-1], width[1][::-1], rngs=rngs, bias=bias, std=std)

    def __call__(self, hidden: Float[Array, "b s d"]) -> Float[Array, "b 1 d"]:
        """Of each row, in the dtype of `hidden`."""
        probe = gather_weight(self.probe[...], ("embed",), dtype=hidden.dtype)
        mixed = self._mixed(self.attn.q(probe[None])[0], hidden)
        y = constrain(self.attn.o(mixed), "batch", "embed")
        wide = constrain(self.up(self.norm(y)), "batch", "mlp")
        y = y + self.down(ACTIVATIONS[self.activation](wide))
        return constrain(y[:, None], "batch", None, "embed")

    def _mixed(
        self, query: Float[Array, "n h"], hidden: Float[Array, "b s d"]
    ) -> Float[Array, "b n h"]:
        keys, values = linears(hidden, (self.attn.k.map, self.attn.v.map))
        keys = constrain(keys, "batch", "seq", "kv_heads", "head_dim")
        values = constrain(values, "batch", "seq", "kv_heads", "head_dim")
        scale = query.shape[-1] ** -0.5
        scores = jnp.einsum("nh,bsnh->bns", query, keys, preferred_element_type=jnp.float32)
        shares = jax.nn.softmax(scores * scale, axis=-1).astype(hidden.dtype)
        mixed = jnp.einsum("bns,bsnh->bnh", shares, values, preferred_element_type=jnp.float32)
        return constrain(mixed.astype(hidden.dtype), "batch", "heads", "head_dim")
