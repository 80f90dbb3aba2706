"""Drafts without a model: what followed the last tokens where they came before."""

import copy
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from colossax.errors import InputError
from colossax.inference.engine.drafting.drafter import Drafter, Guesses, View

LONGEST = 3
"""Last tokens that are looked for; where they never came before, fewer of them."""


class NgramDrafter(Drafter):
    """Copies what came after the last place where a seat's last tokens stand together.

    Most is gained where texts quote what was asked: summaries, code that is changed, retrieval.

    Cost: compares `longest` times all positions of all seats, and holds nothing.
    Reference: Saxena 2023, Prompt Lookup Decoding.
    """

    def __init__(self, tokens: int = 4, *, longest: int = LONGEST):
        """Nothing is compiled.

        Args:
            tokens: How many are copied.
            longest: Last tokens that have to stand together.

        Raises:
            InputError: A number is below 1.
        """
        for name, value in {"tokens": tokens, "longest": longest}.items():
            if value < 1:
                raise InputError(f"{name}: found {value}; give 1 or more")
        self.tokens, self._longest = tokens, longest
        self._vocab = 0

    def fitted(self, program: Any) -> "NgramDrafter":
        """See `Drafter`."""
        one = copy.copy(self)
        one._vocab = program.config.vocab
        return one

    def draft(self, params: Any, held: Any, view: View) -> tuple[Guesses, Any]:
        """See `Drafter`."""
        follows = ngram_follows(view.said, view.length, self._longest)
        at = follows[:, None] + jnp.arange(self.tokens, dtype=jnp.int32)
        # Behind the last token that is known there is what this draft itself says.
        period = view.length[:, None] - follows[:, None]
        at = jnp.where(
            at < view.length[:, None], at, follows[:, None] + (at - follows[:, None]) % period
        )
        found = jnp.take_along_axis(view.said, at, axis=1)
        # Places of images are no tokens that anybody says.
        return Guesses(tokens=jnp.where(found < self._vocab, found, 0)), held


def ngram_follows(
    said: Int[Array, "r s"], length: Int[Array, " r"], longest: int
) -> Int[Array, " r"]:
    """Position behind the last place where each seat's last tokens stood before.

    Of the longest run of last tokens, at most `longest`, that stands before the end; position 0
    where even the last token is new.

    Args:
        said: Tokens by position.
        length: How many there are; 1 or more.
        longest: See there.
    """
    at = jnp.arange(said.shape[1], dtype=jnp.int32)
    # same[r, p]: how many tokens up to p equal those up to the last one.
    same = jnp.zeros(said.shape, jnp.int32)
    going = at < length[:, None] - 1
    for back in range(longest):
        last = jnp.take_along_axis(said, jnp.maximum(length - 1 - back, 0)[:, None], axis=1)
        shifted = jnp.roll(said, back, axis=1)
        going &= (shifted == last) & (at >= back) & (length[:, None] - 1 >= back)
        same += going
    best = jnp.max(same, axis=1, keepdims=True)
    places = jnp.where((same == best) & (best > 0), at, -1)
    return jnp.max(places, axis=1) + 1
