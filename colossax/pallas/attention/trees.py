"""Trees of guessed tokens as the kernel of attention to pages knows them: words of ancestors."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from colossax.pallas.paged_attention import Seen
from colossax.pallas.paged_attention.seen import WORD_BITS, WORDS

from .pages import Branches

MOST_NODES = WORDS * WORD_BITS
"""Of a tree with its root: a bit for each."""


def with_trees(seen: Seen, place: Int[Array, "g w"], trees: Branches) -> Seen:
    """What tokens see whose guesses are trees: of their range what lies before it, and their line.

    Positions of what lies in a tree are no slots, so no range of slots says what a window or a
    chunk shows of it: bits do.

    Args:
        seen: The range that each token sees, of positions.
        place: Its position; negative: it is none, and sees nothing.
        trees: Of the groups, see `Branches.of_groups`; of at most `MOST_NODES`.

    Cost: `64 g w` integers.
    """
    begin, nodes = trees.begin[:, None], trees.depth.shape[1]
    position = (begin + trees.depth)[:, None]
    shown = (position >= seen.lo[..., None]) & (position <= place[..., None])
    shown = jnp.pad(shown, ((0, 0), (0, 0), (0, MOST_NODES - nodes)))
    shown = shown.reshape(*place.shape, WORDS, WORD_BITS).astype(jnp.uint32)
    bits = shown << jnp.arange(WORD_BITS, dtype=jnp.uint32)
    words = jnp.sum(bits, axis=-1, dtype=jnp.uint32)
    more = ((0, 0), (0, 0), (0, WORDS - trees.line.shape[-1]))
    return Seen(
        lo=seen.lo,
        hi=jnp.minimum(seen.hi, begin),
        base=trees.begin,
        words=words & jnp.pad(trees.line, more),
    )
