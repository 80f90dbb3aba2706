"""Dropout in a model's layers: what rows, layers and sublayers draw it from."""

import contextlib
import contextvars
import dataclasses
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from colossax.errors import InputError
from colossax.nn.config import DropoutConfig
from colossax.pallas.dropout import PairDropout, dropped, folded
from colossax.sharding import current_order

_EMBEDDING, _RESIDUAL, _ATTENTION, _ADAPTER = range(4)


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
        adapter: Share of what adapters read.
    """

    words: Any
    tokens: Any
    config: DropoutConfig = dataclasses.field(metadata={"static": True})
    adapter: float = dataclasses.field(default=0.0, metadata={"static": True})

    @classmethod
    def of(
        cls,
        config: DropoutConfig,
        keys: Array | None,
        x: Float[Array, "b s d"],
        adapter: float = 0.0,
    ) -> Any:
        """Of rows about to enter a stack; None where nothing is dropped.

        Args:
            config: Shares.
            keys: Data of a random key for each row, `[b, words of a key]`; or None.
            x: What enters.
            adapter: See `Noise`.
        """
        if keys is None or not (config or adapter):
            return None
        words = jnp.zeros(x.shape[:1], jnp.uint32)
        for at in range(keys.shape[1]):
            words = folded(words, keys[:, at])
        tokens = jnp.broadcast_to(current_order().indices(x.shape[1]), x.shape[:2])
        return cls(words=words, tokens=tokens, config=config, adapter=adapter)

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

    def read_by(self, name: str) -> "InputNoise":
        """What the adapter of a map of a sublayer does not read; each name has its own."""
        words = folded(folded(self.words, _ADAPTER), jnp.uint32(zlib.crc32(name.encode())))
        return InputNoise(words=words, tokens=self.tokens, rate=self.adapter)

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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class InputNoise:
    """Which values of a map's input are dropped.

    Attributes:
        words: uint32 `[b]`.
        tokens: int32 `[b, s]`: index in its row of each token.
        rate: Share of them.
    """

    words: Any
    tokens: Any
    rate: float = dataclasses.field(metadata={"static": True})

    def __call__(self, x: Float[Array, "b s *in"]) -> Float[Array, "b s *in"]:
        """`x` with some values 0; a value's place is the number that it has in the whole input.

        Raises:
            InputError: These are no tokens of whole rows.
        """
        if x.shape[:2] != self.tokens.shape:
            raise InputError(
                f"adapter.dropout: a map reads {list(x.shape)}, and values are dropped by their"
                f" tokens' places in rows of {list(self.tokens.shape)}; leave that map out of"
                " adapter.targets, or adapter.dropout at 0"
            )
        wide = x.reshape(*x.shape[:2], -1)
        return dropped(wide, self.words, self.tokens, self.rate).reshape(x.shape)


_SUBLAYER: contextvars.ContextVar[Noise | None] = contextvars.ContextVar("sublayer", default=None)


@contextlib.contextmanager
def in_sublayer(noise: Noise | None) -> Iterator[None]:
    """Say to the maps of a sublayer that is being traced what its adapters do not read."""
    if noise is None or not noise.adapter:
        yield
        return
    before = _SUBLAYER.set(noise)
    try:
        yield
    finally:
        _SUBLAYER.reset(before)


def read_by(name: str) -> InputNoise | None:
    """What an adapter does not read where it is called; None: it reads all."""
    noise = _SUBLAYER.get()
    return None if noise is None else noise.read_by(name)
