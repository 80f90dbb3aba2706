"""Dropout as a function of places: no mesh, order of work or microbatch changes what it drops.

The random bits of a value are a hash of a word for its row and of the value's place there. They
take no memory, nothing is sent for them, and backward computes them anew.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

_APART = 0x9E3779B9
"""Added to small numbers before they are hashed: 0 would stay 0."""


def mixed(x: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """A bijection of 32 bits in which each bit of x changes half of the bits.

    Reference: C. Wellons 2018, Prospecting for Hash Functions: `lowbias32`.
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def folded(words: UInt32[Array, "*#b"], number: Any) -> UInt32[Array, "..."]:
    """Other words for each number.

    Args:
        words: Hashed ones.
        number: An integer, or integers that are broadcast with the words.
    """
    return mixed(words ^ _spread(number))


def _spread(number: Any) -> Array:
    return mixed(jnp.asarray(number).astype(jnp.uint32) + jnp.uint32(_APART))


def dropped(
    x: Float[Array, "b s d"], words: UInt32[Array, " b"], tokens: Int[Array, "b s"], rate: float
) -> Float[Array, "b s d"]:
    """x with a share `rate` of its values 0 and the others divided by `1 - rate`.

    Value `[i, j, f]` is kept where `hash(hash(words[i], tokens[i, j]), f) >= rate 2^32`.

    Args:
        x: Any array of rows of tokens.
        words: Of the rows, hashed.
        tokens: Index in its row of each token, however rows lie.
        rate: From 0 to below 1.

    Cost: about ten integer operations a value, forward and backward; no memory, nothing is sent.
    """
    return _dropped(float(rate), x, words, tokens)


def _times(rate: float, x: Array, words: Array, tokens: Array) -> Array:
    of_tokens = folded(words[:, None], tokens)
    features = _spread(jnp.arange(x.shape[-1], dtype=jnp.uint32))
    factor = _factor(mixed(of_tokens[..., None] ^ features), rate)
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


_dropped = jax.custom_vjp(_times, nondiff_argnums=(0,))
_dropped.defvjp(
    lambda rate, x, words, tokens: (_times(rate, x, words, tokens), (words, tokens)),
    lambda rate, saved, dy: (_times(rate, dy, *saved), None, None),
)


def _factor(bits: UInt32[Array, "*shape"], rate: float) -> Float[Array, "*shape"]:
    """`1 / (1 - rate)`, or 0 for that share of all bits."""
    first = jnp.uint32(min(round(rate * 2**32), 2**32 - 1))
    return jnp.where(bits >= first, jnp.float32(1 / (1 - rate)), jnp.float32(0))


# Fields are Any: trees of this type also hold partition specs, shapes or None.
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PairDropout:
    """Which probabilities of attention are 0; the others are divided by `1 - rate`.

    A query's probabilities are those of a softmax over all keys that it sees; only then some are
    dropped. Which ones depends on row, head and the positions of query and key in the mask, where
    those left out are indices in the row. `xla`, `reference` and the schemes of
    `sharding.sequence` have it; the other kernels decline.

    Attributes:
        rate: Share that is dropped, from 0 to below 1.
        words: uint32 `[*b]`: of the rows, hashed.
        heads: uint32 `[n]`: number of each query head.
    """

    rate: float = dataclasses.field(metadata={"static": True})
    words: Any
    heads: Any

    @classmethod
    def of(cls, rate: float, words: UInt32[Array, "*b"], heads: int) -> "PairDropout":
        """Of all heads of these rows."""
        return cls(rate=float(rate), words=words, heads=jnp.arange(heads, dtype=jnp.uint32))

    @classmethod
    def shaped(cls, rate: float, rows: tuple[int, ...], heads: int) -> "PairDropout":
        """Likewise in shapes."""
        words, numbers = (jax.ShapeDtypeStruct(x, jnp.uint32) for x in (rows, (heads,)))
        return cls(rate=float(rate), words=words, heads=numbers)

    def replace(self, **changes: Any) -> "PairDropout":
        """With other fields."""
        return dataclasses.replace(self, **changes)

    def factors(
        self, q_position: Int[Array, "*#c s"], kv_position: Int[Array, "*#c t"]
    ) -> Float[Array, "*b n s t"]:
        """What each probability is multiplied by."""
        of_heads = folded(self.words[..., None], self.heads)
        of_queries = folded(of_heads[..., None], q_position[..., None, :])
        bits = mixed(of_queries[..., None] ^ _spread(kv_position)[..., None, None, :])
        return _factor(bits, self.rate)

    def tile(
        self, q_position: Array, kv_position: Array, shape: tuple[int, int], *, transposed: bool
    ) -> Float[Array, "..."]:
        """Those of a tile, `[b, k, g, L, T]` (transposed: `[b, k, T, g, L]`).

        Args:
            q_position: Of its queries, `[b or 1, L]`.
            kv_position: Of its keys.
            shape: b and k. Where b is twice the rows, they come twice.
            transposed: Keys first.
        """
        b, kv_heads = shape
        rows = jnp.tile(self.words, b // self.words.shape[0])
        found = self.replace(words=rows).factors(q_position, kv_position)
        found = found.reshape(b, kv_heads, -1, *found.shape[2:])
        return found.transpose(0, 1, 4, 2, 3) if transposed else found


def why_not_dropout(dropout: PairDropout, lead: tuple[int, ...], heads: int) -> str | None:
    """What contradicts these rows and query heads in it."""
    if not 0 <= dropout.rate < 1:
        return f"rate {dropout.rate} is no share from 0 to below 1"
    found = (*dropout.words.shape, *dropout.heads.shape)
    if found != (*lead, heads):
        shapes = f"words {dropout.words.shape} and heads {dropout.heads.shape}"
        return f"{shapes} are not {lead} and ({heads},)"
    return None
