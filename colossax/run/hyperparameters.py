"""Numbers of an optimizer that live in its state, where `optax.inject_hyperparams` puts them."""

from typing import Any

import jax
import jax.numpy as jnp

from colossax.errors import InputError

_VALUES, _SCHEDULES = "hyperparams", "hyperparams_states"

_EXAMPLE = "optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)"


def hyperparameters(opt_state: Any) -> dict[str, Any]:
    """By name; of several with one name the first."""
    found: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(opt_state)[0]:
        if (name := _name(path, _VALUES)) is not None:
            found.setdefault(name, leaf)
    return found


def with_hyperparameter(opt_state: Any, name: str, value: float) -> Any:
    """The state with a number changed, wherever it is called so; places and dtypes stay.

    Raises:
        InputError: There is none of that name, or a schedule decides it.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(opt_state)
    names = sorted(hyperparameters(opt_state))
    if name not in names:
        there = f"those that can be changed are {', '.join(names)}" if names else "there are none"
        raise InputError(
            f"hyperparameter '{name}': {there}; make the optimizer by {_EXAMPLE} to change it"
        )
    if any(_name(path, _SCHEDULES) == name for path, _ in leaves):
        raise InputError(
            f"hyperparameter '{name}': a schedule decides it at every step; give the optimizer a"
            " number in place of a schedule to change it"
        )

    def changed(path: Any, leaf: Any) -> Any:
        if _name(path, _VALUES) != name:
            return leaf
        return jax.device_put(jnp.full(leaf.shape, value, leaf.dtype), leaf.sharding)

    return jax.tree.unflatten(structure, [changed(path, leaf) for path, leaf in leaves])


def _name(path: tuple[Any, ...], field: str) -> str | None:
    """`learning_rate` of `(..., .hyperparams, ['learning_rate'], ...)`."""
    for at, key in enumerate(path[:-1]):
        if getattr(key, "name", None) == field:
            return str(getattr(path[at + 1], "key", ""))
    return None
