"""Sequences that keep their first pages and their last, and let go of what lies between."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

MASS, PLACE = HEAVY = "k_mass", "k_place"
"""Of each slot and kv head, where seats keep heavy hitters: what was given to its token of all who
looked, float32, and the token's position, int32."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Kept:
    """How much each seat keeps, in whole pages; what a token sees depends on its position alone.

    A token in page p sees the pages before `sinks` and those behind `p - window`, up to itself, as
    if they stood side by side: the first ones are closer by the pages between.

    Attributes:
        sinks: `[seats]` int32: pages from the first on.
        window: `[seats]` int32: pages up to and with the token's own; 0: the seat keeps all.
        ring: `[seats]` int32: places of the table that pages behind `sinks` take in turn; 0: each
            has its own.
        page_tokens: Tokens of a page.

    Source: Xiao et al. 2024, Efficient Streaming Language Models with Attention Sinks.
    """

    sinks: Int[Array, " seats"]
    window: Int[Array, " seats"]
    ring: Int[Array, " seats"]
    page_tokens: int = dataclasses.field(metadata={"static": True})

    def place(self, seat: Array, page: Array) -> Array:
        """Where in a seat's table a page stands."""
        ring, sinks = self.ring[seat], self.sinks[seat]
        in_turn = sinks + (page - sinks) % jnp.maximum(ring, 1)
        return jnp.where((ring > 0) & (page >= sinks), in_turn, page)

    def passed(self, seat: Array, position: Array) -> Array:
        """Pages between the first ones and the window of a token, which it does not see."""
        first = position // self.page_tokens - self.window[seat] + 1
        between = jnp.maximum(0, first - self.sinks[seat])
        return jnp.where(self.window[seat] > 0, between, 0)

    def closer(self, seat: Array, position: Array) -> Array:
        """How much closer than positions say a token sees the first pages; 0 for padding."""
        there = jnp.clip(seat, 0, self.sinks.shape[0] - 1)
        return jnp.where(seat < 0, 0, self.passed(there, position) * self.page_tokens)

    def seen(self, seat: Array, position: Array, key: Array) -> Array:
        """`[w, c]`: which keys tokens of one seat see, if they come before them.

        Args:
            seat: One number.
            position: `[w]`, of the tokens.
            key: `[c]`, positions of keys.
        """
        page = key // self.page_tokens
        last = (position // self.page_tokens)[:, None]
        in_window = page > last - self.window[seat]
        return in_window | (page < self.sinks[seat]) | (self.window[seat] == 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassedOver:
    """Of groups of tokens: the pages between the first ones and their windows, which none sees.

    Attributes:
        sinks: `[g]`, first pages of each.
        least: `[g]`, pages that all of its tokens pass over.
        most: `[g]`, those that one does.
    """

    sinks: Array
    least: Array
    most: Array

    @classmethod
    def of(cls, kept: Kept | None, seat: Array, first: Array, last: Array) -> "PassedOver | None":
        """Of seats of groups, and positions of their first and last tokens."""
        if kept is None:
            return None
        least, most = (kept.passed(seat, x) for x in (first, last))
        return cls(sinks=kept.sinks[seat], least=jnp.minimum(least, most), most=most)

    def pages(self, count: int) -> Int[Array, "g count"]:
        """The first pages that a group reads, in order; some may be behind a seat's last."""
        column = jnp.arange(count, dtype=jnp.int32)
        return column + jnp.where(column >= self.sinks[:, None], self.least[:, None], 0)

    def sinks_in(self, column: Array) -> Array:
        """Whether what begins at this place has first pages that are closer than they stand."""
        return (self.most > 0) & (column < self.sinks)
