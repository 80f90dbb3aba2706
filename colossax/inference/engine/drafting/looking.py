"""Which drafts are right: what a model draws behind each of them, compared."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from colossax.inference.engine.sampling import Chosen, Several


@dataclasses.dataclass(frozen=True, kw_only=True)
class Looked:
    """The tokens of a step that are followed by others, for each seat `[r, 1 + d]`.

    Attributes:
        there: Which there are: the last token that is said, and drafts behind it.
        ids: Theirs.
        position: Theirs.
        kept: Whether the seat has room for it: behind one that has none nothing is right.
    """

    there: Any
    ids: Any
    position: Any
    kept: Any

    def several(self) -> Several:
        """Rows of logits behind each of them, flat."""
        seats, most = self.there.shape
        before = jnp.tril(jnp.ones((most, most), bool))[:, 1:]
        return Several(
            seat=jnp.repeat(jnp.arange(seats, dtype=jnp.int32), most),
            known=jnp.repeat(self.position[:, 0] + 1, most),
            drafted=jnp.repeat(self.ids[:, 1:], most, axis=0),
            before=jnp.tile(before, (seats, 1)),
        )


def accepted(looked: Looked, drawn: Int[Array, "r e"]) -> Int[Array, " r"]:
    """How many drafts of each seat are what the model draws itself, from the first on."""
    right = (drawn[:, :-1] == looked.ids[:, 1:]) & (looked.there & looked.kept)[:, 1:]
    return jnp.sum(jnp.cumprod(right.astype(jnp.int32), axis=1), axis=1)


def said_of(chosen: Chosen, count: Int[Array, " r"], speaks: Bool[Array, " r"]) -> Chosen:
    """What is drawn behind each of a seat's tokens, with how many of it are said.

    Args:
        chosen: Of rows of all seats.
        count: Drafts of each seat that are right.
        speaks: Which seats say something at all.
    """
    seats = len(count)
    of_seats = jax.tree.map(lambda x: x.reshape(seats, -1, *x.shape[1:]), chosen)
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
