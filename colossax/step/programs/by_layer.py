"""A stage's update a layer at a time, where any of its layers' state is in host memory."""

import dataclasses
from typing import Any

import jax
import optax

from colossax.config import BoundPlan
from colossax.optim import DimsOptimizer
from colossax.step.gradients.accumulate import LossCall
from colossax.step.gradients.method import Gradients
from colossax.step.offloaded.streaming import Streaming, check_streamable
from colossax.step.state import StateLayout
from colossax.step.trainable import chosen, optimised
from colossax.step.updaters import Updated, WholeRule
from colossax.typing import Params, TrainState


class ByLayer:
    """What gradients make of a stage's parameters and their optimizer state, layer by layer.

    Cost: on a device two layers of what is in host memory; each crosses the bus once each way.
    """

    def __init__(
        self,
        here: BoundPlan,
        call: LossCall,
        infos: Any,
        trainable: Any,
        optimizer: DimsOptimizer,
        rule: optax.GradientTransformation,
        clip_norm: float | None,
    ):
        """Divide; nothing is traced.

        Args:
            here: The plan on the stage's devices.
            call: The loss.
            infos: Of the parameters that it holds.
            trainable: Tree of booleans.
            optimizer: As it was given.
            rule: Made of it for all of these.
            clip_norm: Global norm that gradients are scaled down to, or None.

        Raises:
            PlanError: Layers cannot be updated one by one.
        """
        learning = chosen(infos, trainable)
        check_streamable(here, infos, learning, optimizer)
        moments = StateLayout(here, infos, optimised(learning), rule, {}).map_moments
        self._learns = jax.tree.leaves(trainable)
        self._streaming = Streaming(call, here, infos, trainable, optimizer, moments, clip_norm)

    def updated(self, state: TrainState, gradients: Gradients) -> Updated:
        """The state after these gradients of the whole batch."""
        found = iter(jax.tree.leaves(gradients.grads))
        grads = [next(found) if learns else None for learns in self._learns]
        return self._streaming.updated(state, dataclasses.replace(gradients, grads=grads))

    def init_state(self, params: Params, shardings: Any) -> Any:
        """See `Updater`."""
        return self._streaming.init_state(params, shardings)


def rule_of(
    here: BoundPlan,
    call: LossCall,
    infos: Any,
    trainable: Any,
    optimizer: DimsOptimizer,
    rule: optax.GradientTransformation,
    clip_norm: float | None,
) -> WholeRule | ByLayer:
    """How a stage is updated: all at once if it is on the devices; see `ByLayer`."""
    if any(info.on_host or info.optimizer_on_host for info in jax.tree.leaves(infos)):
        return ByLayer(here, call, infos, trainable, optimizer, rule, clip_norm)
    return WholeRule(rule, infos, trainable, clip_norm)
