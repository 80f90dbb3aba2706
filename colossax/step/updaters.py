"""What a step is made of: who updates the state in its program, and who follows the program."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax

from colossax.config import BoundPlan, LossScale
from colossax.optim import applied, rounding_key, steps_of
from colossax.sharding import current
from colossax.step.gathering import accepted
from colossax.step.gradients.loss_scale import LOSS_SCALE, next_scale, scale_in
from colossax.step.gradients.method import GradientMethod, Gradients
from colossax.step.microbatches import Microbatches
from colossax.step.trainable import by_own_rules, chosen, joined, split
from colossax.typing import Metrics, Params, TrainState

RECORDED = ("loss", "grad_norm", "tokens", "skipped")
"""Metrics that every step has: scalars, which a run records."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Updated:
    """What an update gives.

    Attributes:
        params: New, or the old ones where the gradients are not finite.
        opt_state: Likewise.
        gradients: `Gradients` of the batch; `grads` may be left out.
        finite: Whether loss and norm are.
        pending: For what follows the program; None where nothing does.
    """

    # While JAX takes it apart, its leaves are other things than arrays.
    params: Any
    opt_state: Any
    gradients: Any
    finite: Any
    pending: Any = None


jax.tree_util.register_dataclass(
    Updated, ["params", "opt_state", "gradients", "finite", "pending"], []
)


@runtime_checkable
class Updater(Protocol):
    """Takes the state from one step to the next, inside a program."""

    @property
    def gradients(self) -> GradientMethod:
        """Gradients alone, before clipping."""
        ...

    def update(self, state: TrainState, micro: Microbatches) -> Updated:
        """New parameters and optimizer state."""
        ...

    def init_state(self, params: Params, shardings: Any) -> Any:
        """Optimizer state for these parameters, each array made where it lives."""
        ...

    def pending_shardings(self, replicated: Any) -> Any:
        """Of what is left to whoever follows the program; None where nothing is.

        Args:
            replicated: Of what every device has.
        """
        ...

    def jitted(self, pure: Callable, shardings: TrainState, **options: Any) -> Any:
        """`pure` compiled, its old state given up."""
        ...


@runtime_checkable
class Follower(Protocol):
    """Finishes a step once its program has ended."""

    def update(self, state: TrainState, pending: Any, metrics: Metrics) -> TrainState:
        """The state with its part of it updated; the metrics are those of the program."""
        ...


class WholeRule:
    """What gradients make of parameters and optimizer state, all at once."""

    def __init__(
        self,
        optimizer: optax.GradientTransformation,
        infos: Any,
        trainable: Any,
        clip_norm: float | None,
    ):
        """Bind; nothing is traced.

        Args:
            optimizer: Of the parameters that learn, but for those with a rule of their own.
            infos: Of all parameters.
            trainable: Tree of booleans.
            clip_norm: Global norm that gradients are scaled down to, or None.
        """
        self._optimizer = optimizer
        self._infos = infos
        self._optimised = jax.tree.map(lambda info, t: t and info.update is None, infos, trainable)
        self._clip_norm = clip_norm

    def updated(self, state: TrainState, gradients: Gradients) -> Updated:
        """The state after these gradients of the whole batch."""
        grads, finite = gradients.grads, gradients.finite
        if (factor := gradients.factor(self._clip_norm)) is not None:
            grads = jax.tree.map(lambda g: (g * factor).astype(g.dtype), grads)
        params, others = split(state["params"], self._optimised)
        grads = jax.tree.map(lambda keep, g: g if keep else None, self._optimised, grads)
        steps, opt_state = steps_of(
            self._optimizer, grads, state["opt_state"], params, loss=gradients.loss
        )
        others = by_own_rules(self._infos, others, gradients.grads)
        moving = chosen(self._infos, self._optimised)
        new = joined(applied(moving, params, steps, rounding_of(current(), state)), others)
        new = accepted(self._infos, finite, new, state["params"])
        keep = functools.partial(jnp.where, finite)
        opt_state = jax.tree.map(keep, opt_state, state["opt_state"])
        return Updated(params=new, opt_state=opt_state, gradients=gradients, finite=finite)

    def init_state(self, params: Params, shardings: Any) -> Any:
        """See `Updater`."""
        init = jax.jit(self._optimizer.init, out_shardings=shardings)
        return init(chosen(params, self._optimised))


def rounding_of(bound: BoundPlan | None, state: TrainState) -> Any:
    """What new parameters are rounded by at random; None where the plan wants the nearest."""
    if bound is None or bound.plan.precision.rounding == "nearest":
        return None
    return rounding_key(state["step"], state["rng"])


def concluded(
    after_step: Callable | None,
    state: TrainState,
    updated: Updated,
    loss_scale: LossScale,
) -> tuple[TrainState, Metrics]:
    """The whole state after a step, and its metrics.

    Args:
        after_step: See `StepOptions`.
        state: Before it.
        updated: What the updater gave.
        loss_scale: How that of the state changes, where it has one.
    """
    gradients, finite = updated.gradients, updated.finite
    variables = state["variables"]
    if after_step is not None:
        changed = after_step(variables, gradients.sums)
        variables = jax.tree.map(lambda a, b: jnp.where(finite, a, b), changed, variables)
    skipped = state["skipped"] + jnp.where(finite, 0, 1)
    weights = [weight for _, weight in gradients.totals.values()]
    metrics = {
        "loss": gradients.loss,
        "grad_norm": gradients.norm,
        "tokens": functools.reduce(jnp.maximum, weights),
        "skipped": skipped.astype(jnp.float32),
        **gradients.shown,
    }
    new = {
        "params": updated.params,
        "opt_state": updated.opt_state,
        "variables": variables,
        "step": state["step"] + 1,
        "rng": state["rng"],
        "skipped": skipped,
    }
    if LOSS_SCALE in state:
        metrics[LOSS_SCALE] = scale_in(state)
        new[LOSS_SCALE] = next_scale(loss_scale, state[LOSS_SCALE], gradients.loss, finite)
    return new, metrics
