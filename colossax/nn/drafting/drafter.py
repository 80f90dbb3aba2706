"""The drafter as a module, and its target beside it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from colossax.nn.attention import Attention, AttentionShape, FlatTokens
from colossax.nn.block import MLP, Block
from colossax.nn.cache import CacheSpec
from colossax.nn.config import DecoderConfig
from colossax.nn.config.drafter import DrafterConfig
from colossax.nn.decoder.layers import Layers, make_norm
from colossax.nn.decoder.shapes import attention_shape
from colossax.nn.decoder.trunk import Rows, Trunk
from colossax.nn.decoder.vocabulary import head_input
from colossax.nn.drafting.reading import TargetAttention, TargetKeys, TargetPages, block_mask
from colossax.nn.layers import depth_scaled
from colossax.nn.module import MakeModel
from colossax.sharding import compute_dtype, with_ranges

DRAFTER, TARGET = "drafter", "target"
"""Names of the models, where both are trained as one."""

_FROZEN = {"learns": False, "of_base": True}
"""What is said of the target's parameters."""


class Drafter(Trunk):
    """Embeddings of the target to hidden states that the target's head reads.

    Each layer attends to its own tokens, to the target's last layer, and has an MLP.
    """

    def __init__(self, config: DrafterConfig, target: DecoderConfig, *, rngs: nnx.Rngs):
        """Build it.

        Args:
            config: Of the drafter.
            target: Sizes of the model that it drafts for.
            rngs: Keys of the parameters.

        Raises:
            InputError: They do not go together.
        """
        self.drafter = config
        sizes = config.decoder(target)
        own = attention_shape(sizes)
        assert isinstance(own, AttentionShape)  # nothing of it is latent
        read = dataclasses.replace(own, **_read_as(target), alibi=False)
        self.reads = read
        layers = Layers(make=lambda rngs: _layer(sizes, own, read, rngs), order=sizes.layers)
        super().__init__(sizes, rngs=rngs, layers=layers)

    def hidden(
        self,
        embeddings: Float[Array, "b s d"],
        keys: Mapping[str, Float[Array, "b s k h"]],
        offsets: Int[Array, " b"],
        *,
        positions: Int[Array, "b s"] | None = None,
        segments: Int[Array, "b s"] | None = None,
    ) -> Float[Array, "b s d"]:
        """Final hidden states of whole rows, with what the target has seen block by block.

        Args:
            embeddings: Of the target.
            keys: `k` and `v` of the target's last layer, `Decoder.hidden_and_keys`.
            offsets: Where blocks begin, see `block_mask`.
            positions, segments: As of `Decoder.hidden`.

        Raises:
            InputError: The sequence is longer than the model's.
        """
        rows = Rows(positions=positions, segments=segments)
        x, side = self.enter(embeddings, rows)
        mask = block_mask(x.shape[1], self.drafter.block, offsets, segments)
        mask = with_ranges(*self.reads.call(mask, x))
        side = dataclasses.replace(side, source=TargetKeys(k=keys["k"], v=keys["v"], mask=mask))
        return head_input(self.leave(self.layers(x, side).carry))

    def decode(
        self,
        embeddings: Float[Array, "t d"],
        cache: dict[str, Any],
        flat: FlatTokens,
        seen: TargetPages,
    ) -> tuple[Float[Array, "t d"], dict[str, Any]]:
        """Final hidden states of flat tokens of any sequences, and its own cache with them in it.

        Args:
            embeddings: Of the target.
            cache: Its own, as `cache_spec` says.
            flat: Where each token belongs in its own cache.
            seen: What the target has seen of each token's sequence; only read.
        """
        x = embeddings[None].astype(compute_dtype(embeddings.dtype))
        ids = jnp.zeros(flat.seat.shape, jnp.int32)  # no part of it asks for them
        x, side = self.enter_flat(x, ids, flat)
        side = dataclasses.replace(side, source=seen)
        out = self.layers(x, side, carried=cache)
        return head_input(self.leave(out.carry))[0], out.carried

    def cache_spec(self, *, seats: int, slots: int, chunk: int | None = None) -> CacheSpec:
        """Keys and values of its own tokens; see `Decoder.cache_spec`."""
        return self.layers.cache_spec(seats=seats, slots=slots, chunk=chunk)


def drafter_maker(config: DrafterConfig, target: DecoderConfig) -> MakeModel:
    """A factory of drafters."""
    return lambda rngs: Drafter(config, target, rngs=rngs)


def as_target(make_model: MakeModel) -> MakeModel:
    """A factory of the same model, all of it frozen and left out of checkpoints.

    It has no gradient and no optimizer state, under any plan: it is of the checkpoint that a run
    starts from.
    """

    def made(rngs: nnx.Rngs) -> nnx.Module:
        model = make_model(rngs)
        for _, node in nnx.iter_graph(model):
            if isinstance(node, nnx.Param) and not node.get_metadata().get("noted", False):
                node.set_metadata(**_FROZEN)
        return model

    return made


def _read_as(target: DecoderConfig) -> dict[str, Any]:
    """How the target's last layer turns its keys, as fields of a shape of attention."""
    last: Any = attention_shape(target, target.sees_all[-1])
    return {"turned": last.turned, "interleaved": last.interleaved}


def _layer(sizes: DecoderConfig, own: Any, read: Any, rngs: nnx.Rngs) -> Block:
    std, out_std = sizes.init_std, depth_scaled(sizes.init_std, sizes.layers)
    given = {"rngs": rngs, "std": std, "out_std": out_std}
    mlp = MLP(sizes.embed, sizes.mlp, activation=sizes.activation, gated=sizes.gated, **given)
    sublayers = {
        "attn": Attention(own, **given),
        "cross": TargetAttention(read, **given),
        "mlp": mlp,
    }
    return Block(sublayers, lambda: make_norm(sizes))
