"""Which slots of its sequence a token sees."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

WORD_BITS = 32
WORDS = 2
"""Of a token: 64 slots behind what is settled."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """A range of what is settled and, of the slots behind that, any.

    Tokens that were proposed and not yet accepted lie in slots from `base` on, those of several
    continuations beside one another; a token sees its own ancestors among them, which no range
    says. It is a number of 64 bits in two words, the low one first.

    Attributes:
        lo: `[g, w]` int32: the first slot that a token sees.
        hi: `[g, w]` int32: one behind the last; a token with `hi <= lo` sees none of these.
        base: `[g]` int32, not below any `hi` of the group; None: nothing is unsettled.
        words: `[g, w, 2]` uint32: bit i says whether a token sees the slot `base + i`.
    """

    lo: Any
    hi: Any
    base: Any = None
    words: Any = None

    def of(self, slots: Int[Array, " c"]) -> Bool[Array, "g w c"]:
        """Whether each token sees each of these slots."""
        seen = (slots >= self.lo[..., None]) & (slots < self.hi[..., None])
        if self.words is None:
            return seen
        place = slots - self.base[:, None]
        bit = jnp.clip(place, 0, WORDS * WORD_BITS - 1)[:, None]
        low, high = (self.words[..., i, None] for i in range(WORDS))
        word = jnp.where(bit < WORD_BITS, low, high)
        named = (word >> (bit % WORD_BITS).astype(jnp.uint32)) & 1 == 1
        there = (place >= 0) & (place < WORDS * WORD_BITS)
        return seen | (named & there[:, None])

    def bounds(self) -> Int[Array, "g 4"]:
        """Of a group: the first slot that any token sees, those from and up to which all see all,

        and one behind the last that any sees. Tokens that see nothing do not count; where no token
        sees anything all four are 0.
        """
        ranged = self.hi > self.lo
        most = jnp.iinfo(jnp.int32).max
        first = jnp.min(jnp.where(ranged, self.lo, most), axis=1)
        all_from = jnp.max(jnp.where(ranged, self.lo, 0), axis=1)
        all_to = jnp.min(jnp.where(ranged, self.hi, most), axis=1)
        last = jnp.max(jnp.where(ranged, self.hi, 0), axis=1)
        some = jnp.any(ranged, axis=1)
        if self.words is not None:
            branched = jnp.any(self.words != 0, axis=-1)
            low, high = (
                WORD_BITS - jax.lax.clz(self.words[..., i]).astype(jnp.int32) for i in range(WORDS)
            )
            reach = self.base[:, None] + jnp.where(high > 0, WORD_BITS + high, low)
            any_branched = jnp.any(branched, axis=1)
            first = jnp.where(any_branched, jnp.minimum(first, self.base), first)
            last = jnp.maximum(last, jnp.max(jnp.where(branched, reach, 0), axis=1))
            all_to = jnp.where(jnp.any(branched & ~ranged, axis=1), 0, all_to)
            some |= any_branched
        bounds = jnp.stack([first, all_from, all_to, last], axis=1)
        return jnp.where(some[:, None], bounds, 0)
