"""Embeddings of tokens, and logits of them."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from colossax.errors import InputError
from colossax.nn.adapters.by_token import AdaptedByToken
from colossax.nn.config import DecoderConfig
from colossax.nn.decoder.head import check_vocabulary
from colossax.nn.layers import Embedding, Linear
from colossax.nn.module import param
from colossax.nn.quantised.scaled import ScaledWeight
from colossax.sharding import constrain, gather_weight

_IN_PARTS = ScaledWeight, AdaptedByToken
"""Weights that multiply by themselves: codes and then scales, or each token's own adapter."""


class Vocabulary(nnx.Module):
    """What a model of tokens has at its ends: a table, and a head, which may be the table.

    Attributes:
        config: Of the model.
        embed: See `make_embedding`.
        head, head_bias: See `make_head`.
    """

    config: DecoderConfig
    embed: Embedding | None
    head: Linear | None
    head_bias: Any

    def embedded(self, tokens: Any, config: DecoderConfig | None = None) -> Any:
        """Embeddings of token ids `[b, s]`, in the compute dtype.

        Args:
            tokens: Ids.
            config: Of the stack that they are for; None: the model's.

        Raises:
            InputError: The model reads images.
        """
        if self.embed is None:
            raise InputError(
                "hidden: the model reads images, and tokens are given; give pixels,"
                " [batch, height, width, channels]"
            )
        x, scale = self.embed(tokens), (self.config if config is None else config).embed_scale
        return x if scale == 1 else x * jnp.asarray(scale, x.dtype)

    def head_weight(self) -> Float[Array, "d v"]:
        """The output matrix in the compute dtype, its vocabulary split as that of logits.

        Its width is unsharded: logits are far larger than hidden states, so those are
        gathered, not these summed up. What the configuration multiplies logits by is in it.

        Raises:
            InputError: The model tells something else.
        """
        check_vocabulary(self.config)
        if self.head is None:
            assert self.embed is not None
            weight = self.embed.weight.gathered(to=("vocab", None)).T
        else:
            weight = self.head.weight.gathered(to=(None, "vocab"))
        scale = self.config.logit_scale
        return weight if scale == 1 else weight * scale

    @property
    def readout(self) -> dict[str, Any]:
        """What makes logits of the product with `head_weight`, as `cross_entropy` takes it."""
        told: dict[str, Any] = {}
        if self.config.logit_cap is not None:
            told["soft_cap"] = self.config.logit_cap
        if self.head_bias is not None:
            bias = gather_weight(self.head_bias[...], ("vocab",), dtype=jnp.dtype("float32"))
            told["bias"] = bias * self.config.logit_scale
        return told

    def logits(self, hidden: Float[Array, "*lead d"]) -> Float[Array, "*lead v"]:
        """Logits of the hidden states given; pass chosen tokens only where not all are needed."""
        logits, readout = self._product(hidden), self.readout
        if "bias" in readout:
            logits = logits + readout["bias"].astype(logits.dtype)
        cap = readout.get("soft_cap")
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def _product(self, hidden: Float[Array, "*lead d"]) -> Float[Array, "*lead v"]:
        """Hidden states times `head_weight`, which is not made where it is multiplied in parts."""
        if self.head is None or not isinstance(self.head.weight, _IN_PARTS):
            return hidden @ self.head_weight()
        logits, scale = self.head(hidden), self.config.logit_scale
        return logits if scale == 1 else logits * scale


def make_embedding(config: DecoderConfig, rngs: nnx.Rngs) -> Embedding | None:
    """The table of tokens that a configuration describes; None where it reads none."""
    if not config.vocab:
        return None
    width = config.logit_width
    return Embedding(
        config.vocab, width, rngs=rngs, dim="vocab", std=config.init_std, tied=config.tied
    )


def make_head(config: DecoderConfig, rngs: nnx.Rngs) -> tuple[Linear | None, nnx.Param | None]:
    """The output matrix, None where it is the table or something else is told; and its bias."""
    head = bias = None
    if not config.tied and config.head is None:
        shape = (config.logit_width, config.vocab)
        head = Linear(shape, ("embed", "vocab"), rngs=rngs, std=config.init_std)
    if config.head_bias and config.head is None:
        bias = param(jnp.zeros((config.vocab,), jnp.float32), ("vocab",))
    return head, bias


def head_input(x: Float[Array, "b s d"]) -> Float[Array, "b s d"]:
    """Input of the head: the sequence as the batch has it."""
    return constrain(x, "batch", "seq", "embed")
