"""Guesses as trees: several tokens for one place, of which the model draws one or none."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from colossax.inference.cache import Cache
from colossax.inference.engine.pages import Fixed
from colossax.pallas.attention import Branches, Pages

WORD = 32

MOST_NODES = 64
"""Of a tree with its root: two words of a bit for each."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Tree:
    """Who follows whom among the guesses of each seat; number 0 is the last token that is said.

    Attributes:
        parent: Of each guess, `[r, d]` int32: a smaller number than its own, which counts from 1.
        depth: Of all with the root, `[r, 1 + d]` int32.
        line: Whether a token, `[r, 1 + d, ...]`, comes behind another or is it, `[..., 1 + d]`
            bool.
    """

    parent: Any
    depth: Any
    line: Any

    @classmethod
    def of(cls, parent: Int[Array, "r d"]) -> "Tree":
        """From who follows whom."""
        seats, drafts = parent.shape
        rows = jnp.arange(seats, dtype=jnp.int32)
        line = jnp.zeros((seats, drafts + 1, drafts + 1), bool).at[:, 0, 0].set(True)

        def with_next(i: Array, line: Array) -> Array:
            of_parent = line[rows, parent[:, i - 1]]
            return line.at[:, i].set(of_parent.at[:, i].set(True))

        line = jax.lax.fori_loop(1, drafts + 1, with_next, line)
        depth = jnp.sum(line, axis=2, dtype=jnp.int32) - 1
        return cls(parent=parent, depth=depth, line=line)

    def words(self) -> Array:
        """`line` as bits, from the lowest of the first word, `[r, 1 + d, words]` uint32."""
        more = -self.line.shape[2] % WORD
        bits = jnp.pad(self.line, ((0, 0), (0, 0), (0, more))).astype(jnp.uint32)
        bits = bits.reshape(*bits.shape[:2], -1, WORD)
        return jnp.sum(bits << jnp.arange(WORD, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)

    def branches(self, begin: Int[Array, " r"], seat: Array, node: Int[Array, " t"]) -> Branches:
        """What tokens of a step see.

        Args:
            begin: The slot of each seat's root.
            seat: Of each token.
            node: Which of its seat's tree it is; negative: none, a token that is said.
        """
        words = self.words()[jnp.clip(seat, 0), jnp.clip(node, 0)]
        whole = jnp.uint32(0xFFFFFFFF)
        line = jnp.where((node < 0)[:, None], whole, words)
        return Branches(begin=begin, depth=self.depth, line=line)


def moved(
    cache: Cache,
    fixed: Fixed,
    pages: Pages,
    path: Int[Array, "r e"],
    count: Int[Array, " r"],
    begin: Int[Array, " r"],
    room: Int[Array, " r"],
    shares: int,
) -> Cache:
    """What is kept of guesses that were right, from where they lie in the tree to their positions.

    Args:
        cache: Given up.
        fixed: Arrays that hold nothing of single tokens.
        pages: Of the seats.
        path: See `accepted`.
        count: How many were right.
        begin: The slot of each root.
        room: Tokens that each seat's pages hold.
        shares: Devices of a ring among which pages are dealt out, see `Pages.ring`.

    Cost: reads and writes `d` tokens of each seat in all layers.
    """
    seats, most = path.shape
    seat = jnp.broadcast_to(jnp.arange(seats, dtype=jnp.int32)[:, None], path.shape)[:, 1:]
    order = jnp.arange(1, most, dtype=jnp.int32)
    to = begin[:, None] + order
    moves = (order <= count[:, None]) & (path[:, 1:] != order) & (to < room[:, None])
    source = jnp.where(moves, begin[:, None] + path[:, 1:], 0)

    def of_kind(held: dict[str, Array], fixed: frozenset[str]) -> dict[str, Array]:
        return {name: x if name in fixed else of_array(x) for name, x in held.items()}

    def place(slot: Array, shape: tuple[int, ...]) -> tuple[Array, Array]:
        page, column = pages.row_and_column(seat.reshape(-1), slot.reshape(-1), shape, None)
        count = shape[1]
        row = page % shares * (count // shares) + page // shares
        return jnp.where(page < count, row, count), column

    def of_array(x: Array) -> Array:
        row, column = place(source, x.shape)
        taken = x.at[:, row, column].get(mode="clip")
        row, column = place(jnp.where(moves, to, -1), x.shape)
        return x.at[:, row, column].set(taken, mode="drop")

    if isinstance(fixed, Mapping):
        return {kind: of_kind(held, fixed[kind]) for kind, held in cache.items()}
    return of_kind(cache, fixed)
