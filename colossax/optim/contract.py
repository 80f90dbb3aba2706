"""What an optimizer is here, and the mark of those that treat every layer on its own."""

from collections.abc import Callable
from typing import Any

import optax

from colossax.config import at_least
from colossax.config.bounds import DECAYS
from colossax.optim.groups import ALIKE, Groups

LearningRate = float | optax.Schedule
DimsOptimizer = Callable[[Any], optax.GradientTransformation]
"""Takes the dims of the parameters (their tree, leaves tuples of names), gives the optimizer."""


def layerwise(optimizer: DimsOptimizer, groups: Groups = ALIKE) -> DimsOptimizer:
    """Mark an optimizer that treats every layer and expert on its own.

    A step may then update one layer of a stack at a time, each with its slice of the state, and
    get what updating the whole stack gives. The contract: state that mirrors a parameter has its
    unit dims, so that a stack's is that of its layers, stacked; a fresh one knows nothing of the
    parameter's values; nothing in it depends on other layers or parameters; all other state is
    scalar counters, which move alike whichever parameters an update is given.
    An optimizer with a norm over all parameters or a moment that layers share must not be marked.

    Args:
        optimizer: The same, marked.
        groups: Its groups, which a step checks against the parameters.
    """
    optimizer.layerwise = True  # type: ignore[attr-defined]
    return with_groups(optimizer, groups)


def with_groups(optimizer: DimsOptimizer, groups: Groups) -> DimsOptimizer:
    """The same, with the groups that a step checks against the parameters."""
    optimizer.groups = groups  # type: ignore[attr-defined]
    return optimizer


def is_layerwise(optimizer: Any) -> bool:
    """Whether an optimizer is marked as treating every layer and expert on its own."""
    return bool(getattr(optimizer, "layerwise", False))


def check_rates(
    optimizer: str,
    learning_rate: LearningRate,
    *,
    shares: dict[str, float],
    sizes: dict[str, float],
) -> None:
    """Refuse numbers of an optimizer.

    Args:
        optimizer: Its name.
        learning_rate: A number, or a schedule.
        shares: By name, from 0 to below 1.
        sizes: By name, 0 or more.

    Raises:
        InputError: Names the first that is out of range.
    """
    for name, value in shares.items():
        DECAYS.check(value, f"{optimizer}: {name}")
    if not callable(learning_rate):
        sizes = {"learning_rate": learning_rate, **sizes}
    for name, value in sizes.items():
        at_least(0).check(value, f"{optimizer}: {name}")
