"""An optimizer as what it does to one parameter, whose dims it knows."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from colossax.optim.dims import map_with_dims
from colossax.typing import Dims

NOTHING = optax.MaskedNode()
"""In place of state that a parameter has not."""


@runtime_checkable
class Rule(Protocol):
    """What an optimizer does to one parameter, of all its layers and experts at once."""

    @property
    def fields(self) -> Sequence[str]:
        """Names of the state that it keeps beside a parameter."""
        ...

    def start(self, dims: Dims, p: Any) -> tuple[Any, ...]:
        """State of a fresh parameter, by field: an array, or `NOTHING`.

        An array has the dims of the parameter, each of the parameter's size or another (1, blocks);
        unit dims keep theirs, so that a stack's state is that of its layers, stacked.
        """
        ...

    def move(
        self, dims: Dims, count: Int[Array, ""], g: Array, p: Array, state: tuple[Any, ...]
    ) -> tuple[Array, tuple[Any, ...]]:
        """The step along which the parameter goes down, in float32, and the new state.

        Args:
            dims: Of the parameter.
            count: Number of the update, from 1.
            g: Gradient in float32.
            p: Parameter.
            state: By field.
        """
        ...


def by_leaf(rule: Rule, dims: Any) -> optax.GradientTransformation:
    """`rule` for each parameter; its state is `{"count": ..., field: tree like the parameters}`."""

    def init(params: Any) -> dict[str, Any]:
        count = jnp.zeros((), jnp.int32)
        if not jax.tree.leaves(params):  # also what finds out where a state mirrors parameters
            return {"count": count, **dict.fromkeys(rule.fields, params)}
        rows = map_with_dims(lambda d, p: _Row(rule.start(d, p)), dims, params)
        return {"count": count, **_columns(rule.fields, rows)}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, dict[str, Any]]:
        count = jnp.asarray(optax.safe_increment(state["count"]))

        def move(leaf_dims: Dims, g: Array, p: Array, *old: Any) -> _Row:
            step, new = rule.move(leaf_dims, count, g.astype(jnp.float32), p, old)
            return _Row(new, step)

        rows = map_with_dims(move, dims, updates, params, *(state[name] for name in rule.fields))
        steps = jax.tree.map(lambda row: row.step, rows, is_leaf=_is_row)
        return steps, {"count": count, **_columns(rule.fields, rows)}

    return optax.GradientTransformation(init, update)


class _Row:
    """What was found for one parameter."""

    def __init__(self, state: tuple[Any, ...], step: Any = None):
        self.state = state
        self.step = step


def _columns(fields: Sequence[str], rows: Any) -> dict[str, Any]:
    def column(at: int) -> Any:
        return jax.tree.map(lambda row: row.state[at], rows, is_leaf=_is_row)

    return {name: column(at) for at, name in enumerate(fields)}


def _is_row(leaf: Any) -> bool:
    return isinstance(leaf, _Row)
