"""Recurrences over flat tokens, with a state for each seat of a cache."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from colossax.nn.attention import FlatTokens

Step = Callable[[Any, Any], tuple[Any, Any]]
"""`(state, input) -> (state, output)` of one token: trees of arrays."""


def run_recurrence(
    step: Step, inputs: Any, states: Any, row: int | Int[Array, ""], flat: FlatTokens
) -> tuple[Any, Any]:
    """`state, output = step(state, input)` for each token, from its own seat's state on.

    A token at position 0 starts from a state of zeros, whatever its seat held before; padding
    changes none.

    Args:
        step: What one token does.
        inputs: Tree of `[t, ...]`; the tokens of a seat stand in the order of their positions.
        states: Tree of `[layers, seats, ...]`, whole: what a `CacheSpec` of kind `sequence` asks
            for. Donated, or carried by a loop, it is written in place.
        row: Which layer this is; may be traced.
        flat: Where each token belongs; its slot is not looked at.

    Returns:
        Outputs `[t, ...]`, those of padding 0, and the states after the tokens.

    Cost: as many rounds as the most tokens that a seat has, each a step of all seats at once; a
    copy of the layer's states. Sends nothing where the step does not.
    """
    held = jax.tree.map(lambda x: x[row], states)
    t, seats = len(flat.seat), len(jax.tree.leaves(held)[0])
    token = _tokens_of_rounds(flat.seat, seats)
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), (held, inputs))
    outputs = jax.tree.map(
        lambda x: jnp.zeros((t, *x.shape), x.dtype), jax.eval_shape(step, *one)[1]
    )

    def go_on(i: Array, so_far: tuple[Any, Any]) -> tuple[Any, Any]:
        held, outputs = so_far
        now = token[:, i]
        given, position = jax.tree.map(
            lambda x: x.at[now].get(mode="fill", fill_value=0), (inputs, flat.position)
        )
        before = jax.tree.map(lambda x: _chosen(position == 0, jnp.zeros_like(x), x), held)
        after, output = jax.vmap(step)(before, given)
        held = jax.tree.map(lambda x, new: _chosen(now < t, new.astype(x.dtype), x), held, after)
        return held, jax.tree.map(lambda x, new: x.at[now].set(new, mode="drop"), outputs, output)

    rounds = jnp.max(jnp.sum(token < t, axis=1))
    held, outputs = jax.lax.fori_loop(0, rounds, go_on, (held, outputs))
    return outputs, jax.tree.map(lambda x, new: x.at[row].set(new), states, held)


def _tokens_of_rounds(seat: Int[Array, " t"], seats: int) -> Int[Array, "seats t"]:
    """For each seat its first token, its second and so on; t where it has no more."""
    t = len(seat)
    before = jnp.tril(seat[:, None] == seat[None, :], -1).sum(axis=1)
    # A negative index would count from the end: move it out of range, where it is dropped.
    to = jnp.where(seat < 0, seats, seat)
    return jnp.full((seats, t), t).at[to, before].set(jnp.arange(t), mode="drop")


def _chosen(which: Bool[Array, " seats"], x: Array, y: Array) -> Array:
    """x in the seats where it is so, y elsewhere."""
    return jnp.where(which.reshape(-1, *[1] * (x.ndim - 1)), x, y)
