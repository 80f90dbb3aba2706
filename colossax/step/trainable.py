"""Parameters that learn, and the others."""

from collections.abc import Callable
from typing import Any

import jax

from colossax.errors import InputError
from colossax.typing import ParamInfo


def chosen(tree: Any, choice: Any) -> Any:
    """`tree` with None in place of the leaves that are not chosen."""
    return jax.tree.map(lambda leaf, keep: leaf if keep else None, tree, choice)


def split(params: Any, trainable: Any) -> tuple[Any, Any]:
    """Trainable and frozen parameters, None in place of the others."""
    frozen = jax.tree.map(lambda t: not t, trainable)
    return chosen(params, trainable), chosen(params, frozen)


def joined(params: Any, frozen: Any) -> Any:
    """One tree from two that hold None where the other has a leaf."""
    return jax.tree.map(
        lambda a, b: b if a is None else a, params, frozen, is_leaf=lambda leaf: leaf is None
    )


def optimised(infos: Any) -> Any:
    """Those that an optimizer updates: that have no rule of their own."""
    return jax.tree.map(lambda info: info if info.update is None else None, infos)


def by_own_rules(infos: Any, params: Any, grads: Any) -> Any:
    """Parameters, those with a rule of their own and a gradient updated by it."""

    def one(info: ParamInfo, value: Any, grad: Any) -> Any:
        if info.update is None or value is None or grad is None:
            return value
        update = jax.vmap(info.update) if info.stacked else info.update
        return update(value, grad).astype(value.dtype)

    return jax.tree.map(one, infos, params, grads)


def trainable_tree(infos: Any, trainable: Callable[[ParamInfo], bool] | None) -> Any:
    """Of each parameter, whether it learns: by itself, and as the filter says."""
    chosen = jax.tree.map(
        lambda info: info.learns and (trainable is None or bool(trainable(info))), infos
    )
    if not any(jax.tree.leaves(chosen)):
        raise InputError(
            "trainable: no parameter is left to train; let the filter accept some of those that"
            " learn"
        )
    return chosen
