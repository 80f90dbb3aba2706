"""Random keys of a model's factory, drawn without Flax's look at all that was traced before."""

from typing import Any

import jax
from flax import nnx


class _Stream(nnx.RngStream):
    """The keys of `nnx.RngStream`.

    Flax raises its count by assigning to `count[...]`, for which it asks a traced array for its
    layout; JAX refuses that, in a message for which it goes through everything traced so far. So
    the time that a model takes to trace would grow with the square of its parameters: measured
    15 CPU-seconds in place of 0.7 for 48 unrolled layers of an encoder-decoder.
    """

    def __call__(self) -> jax.Array:
        if not isinstance(self.count.get_raw_value(), jax.Array):
            return super().__call__()
        key = jax.random.fold_in(self.key[...], self.count[...])
        self.count.set_raw_value(self.count[...] + 1)
        return key


def fresh_rngs(key: Any) -> nnx.Rngs:
    """What a factory draws its keys from: those of `nnx.Rngs(key)`, to the bit.

    What is drawn from a fork of it (`rngs.fork()`) comes as slowly as Flax draws it.

    Args:
        key: A random key, or an integer that it is made of.
    """
    rngs = nnx.Rngs(key)
    setattr(rngs, "default", _Stream(rngs["default"].key[...], tag="default"))  # noqa: B010
    return rngs
