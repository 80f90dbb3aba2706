"""Dropout in a model's layers: what rows, layers and sublayers draw it from."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from colossax.nn.config import DropoutConfig
from colossax.pallas.dropout import PairDropout, dropped, folded
from colossax.sharding import current_order

_EMBEDDING, _RESIDUAL, _ATTENTION = range(3)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Noise:
    """Which values of a batch's rows are dropped.

    A value is dropped or kept by row, layer, sublayer, token and feature, or head and both tokens,
    alone: `words` are hashes of all of these but those inside of a row.

    Attributes:
        words: uint32 `[b]`, one of each row.
        tokens: int32 `[b, s]`: index in its row of each token.
        config: Shares that are dropped.
    """

    words: Any
    tokens: Any
    config: DropoutConfig = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, config: DropoutConfig, keys: Array | None, x: Float[Array, "b s d"]) -> Any:
        """Of rows about to enter a stack; None where nothing is dropped.

        Args:
            config: Shares.
            keys: Data of a random key for each row, `[b, words of a key]`; or None.
            x: What enters.
        """
        if keys is None or not config:
            return None
        words = jnp.zeros(x.shape[:1], jnp.uint32)
        for at in range(keys.shape[1]):
            words = folded(words, keys[:, at])
        tokens = jnp.broadcast_to(current_order().indices(x.shape[1]), x.shape[:2])
        return cls(words=words, tokens=tokens, config=config)

    def within(self, layer: Any, sublayer: int) -> "Noise":
        """That of a sublayer.

        Args:
            layer: Its number in the stack; may be traced.
            sublayer: Its number in the layer.
        """
        return dataclasses.replace(self, words=folded(folded(self.words, layer), sublayer))

    def entering(self, x: Float[Array, "b s d"]) -> Float[Array, "b s d"]:
        """What enters the first layer, some of it dropped."""
        return self._dropped(x, self.config.embedding, _EMBEDDING)

    def added(self, y: Float[Array, "b s d"]) -> Float[Array, "b s d"]:
        """What a sublayer adds to the residual stream, likewise."""
        return self._dropped(y, self.config.residual, _RESIDUAL)

    def pairs(self, heads: int) -> PairDropout | None:
        """What a sublayer's attention drops, of so many query heads."""
        if not self.config.attention:
            return None
        return PairDropout.of(self.config.attention, folded(self.words, _ATTENTION), heads)

    def _dropped(self, x: Array, rate: float, place: int) -> Array:
        return dropped(x, folded(self.words, place), self.tokens, rate) if rate else x


def pair_shapes(noise: Noise | None, rows: int, heads: int) -> PairDropout | None:
    """What `pairs_of` gives for so many rows, in shapes."""
    if noise is None or not noise.config.attention:
        return None
    return PairDropout.shaped(noise.config.attention, (rows,), heads)


def pairs_of(noise: Noise | None, heads: int) -> PairDropout | None:
    """`noise.pairs`, of noise that may be none."""
    return None if noise is None else noise.pairs(heads)
