"""Which drafts are right: what a model draws behind each of them, compared."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from colossax.inference.engine.drafting.trees import Tree
from colossax.inference.engine.sampling import Chosen, Several


@dataclasses.dataclass(frozen=True, kw_only=True)
class Looked:
    """The tokens of a step that are followed by others, for each seat `[r, 1 + d]`.

    Attributes:
        there: Which there are: the last token that is said, and drafts behind it.
        ids: Theirs.
        position: Theirs.
        kept: Whether the seat has room for it: behind one that has none nothing is right.
        tree: Who follows whom; None: each the one before it.
    """

    there: Any
    ids: Any
    position: Any
    kept: Any
    tree: Tree | None

    def several(self) -> Several:
        """Rows of logits behind each of them, flat."""
        seats, most = self.there.shape
        line = jnp.tile(jnp.tril(jnp.ones((most, most), bool)), (seats, 1, 1))
        if self.tree is not None:
            line = self.tree.line
        return Several(
            seat=jnp.repeat(jnp.arange(seats, dtype=jnp.int32), most),
            known=jnp.repeat(self.position[:, 0] + 1, most),
            drafted=jnp.repeat(self.ids[:, 1:], most, axis=0),
            before=line[:, :, 1:].reshape(seats * most, -1),
        )


def accepted(
    looked: Looked, drawn: Int[Array, "r e"]
) -> tuple[Int[Array, " r"], Int[Array, "r e"]]:
    """How many drafts of each seat are what the model draws itself, one behind another.

    Args:
        looked: What was drafted.
        drawn: What the model draws behind each of it.

    Returns:
        How many, and which: the root first, and behind the last one anything.
    """
    good = (looked.there & looked.kept)[:, 1:]
    seats, most = drawn.shape
    if looked.tree is None:
        right = (drawn[:, :-1] == looked.ids[:, 1:]) & good
        count = jnp.sum(jnp.cumprod(right.astype(jnp.int32), axis=1), axis=1)
        return count, jnp.tile(jnp.arange(most, dtype=jnp.int32), (seats, 1))
    rows = jnp.arange(seats, dtype=jnp.int32)

    def further(i: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        at, count, path = state
        follows = (looked.tree.parent == at[:, None]) & good
        follows &= looked.ids[:, 1:] == drawn[rows, at][:, None]
        goes_on = jnp.any(follows, axis=1)
        child = jnp.argmax(follows, axis=1).astype(jnp.int32) + 1
        # Who has stopped stands at the end of its line: nothing follows there again.
        at = jnp.where(goes_on, child, at)
        return at, count + goes_on, path.at[:, i].set(at)

    zero = jnp.zeros(seats, jnp.int32)
    begun = zero, zero, jnp.zeros((seats, most), jnp.int32)
    _, count, path = jax.lax.fori_loop(1, most, further, begun)
    return count, path


def said_of(
    chosen: Chosen, count: Int[Array, " r"], path: Int[Array, "r e"], speaks: Bool[Array, " r"]
) -> Chosen:
    """What is drawn behind each of a seat's tokens, in order, with how many of it are said.

    Args:
        chosen: Of rows of all seats.
        count, path: See `accepted`.
        speaks: Which seats say something at all.
    """
    rows = jnp.arange(len(count), dtype=jnp.int32)[:, None]
    of_seats = jax.tree.map(lambda x: x.reshape(*path.shape, *x.shape[1:])[rows, path], chosen)
    return dataclasses.replace(of_seats, count=jnp.where(speaks, count + 1, 0))


def with_said(
    said: Int[Array, "r s"], token: Int[Array, "r e"], count: Int[Array, " r"], start: Array
) -> Array:
    """Tokens by position, with those of a step behind the ones that there are.

    Args:
        said: See `EngineState`.
        token: Of each seat, in order.
        count: How many of them are said.
        start: Position of the first, `[r]`.
    """
    order = jnp.arange(token.shape[1], dtype=jnp.int32)
    to = jnp.where(order < count[:, None], start[:, None] + order, said.shape[1])
    rows = jnp.arange(said.shape[0], dtype=jnp.int32)[:, None]
    return said.at[rows, to].set(token, mode="drop")
