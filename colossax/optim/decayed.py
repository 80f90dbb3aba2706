"""From a direction to an optimizer: decoupled weight decay, learning rate, groups."""

from collections.abc import Callable
from typing import Any

import optax

from colossax.optim.contract import DimsOptimizer, LearningRate, layerwise
from colossax.optim.groups import Groups
from colossax.optim.transforms import add_decay


def decayed(
    direction: Callable[[Any], optax.GradientTransformation],
    learning_rate: LearningRate,
    weight_decay: float,
    groups: Groups,
) -> DimsOptimizer:
    """`p -= multiple lr (direction + weight_decay p)`, marked as layerwise.

    Args:
        direction: `dims -> transformation`, of each layer and expert on its own.
        learning_rate: A number, or a schedule of the step count from 0.
        weight_decay: Of matrices and tables.
        groups: Multiples, and decays in place of that one.
    """
    decay = groups.decay_of(weight_decay)
    return layerwise(
        lambda dims: optax.chain(
            direction(dims),
            add_decay(decay, dims),
            optax.scale_by_learning_rate(learning_rate),
            *groups.scaled(dims),
        ),
        groups,
    )
