"""`boost`: a training step from a user's own parts."""

import logging
from collections.abc import Sequence
from typing import Any

import jax

from colossax.config import Plan
from colossax.nn import GivenDims, MakeModels
from colossax.optim import Optimizer
from colossax.planner.arguments import (
    as_plan,
    check_arguments,
    check_placing,
    step_options,
)
from colossax.planner.deciding.settling import Facts, Settled, check_settled, settle
from colossax.planner.idle import warn_of_idle
from colossax.step.checks.whole import cost_of_whole
from colossax.step.loss import Loss
from colossax.step.step import Step
from colossax.typing import TrainState

_LOG = logging.getLogger(__name__)


def boost(
    make_model: MakeModels,
    optimizer: Optimizer,
    loss: Loss,
    plan: Plan | str,
    *,
    devices: Sequence[jax.Device] | None = None,
    dims: GivenDims | None = None,
    seed: int = 0,
    **options: Any,
) -> tuple[TrainState, Step]:
    """A fresh training state and the step that advances it, laid out by a plan.

    Args:
        make_model: `rngs -> nnx.Module`; or several such by name, `{"actor": ..., "critic":
            ...}`: the loss gets `Models`, and the state's `params` are `{"actor": ...,
            "critic": ...}`. Parameters whose dims have no names are found some.
        optimizer: An Optax transformation, or `dims -> transformation` for those of
            `colossax.optim` that treat layers apart; or one for each model by name, whose
            `opt_state` is by name then. Gradients are clipped together.
        loss: `(model, batch) -> ({term: (total, weight, coefficient)}, metrics)`; see `Loss`.
        plan: How to spread it, or the name of a preset; what it leaves to `auto` is settled, see
            `settle`.
        devices: Default all.
        dims: Names of the dims of parameters, by a regular expression that is searched in the
            path: `{r"attn/q/kernel$": ("embed", "heads", "head_dim")}`. The first that matches
            counts; in a layer stack the names are those of one layer.
        seed: Of the parameters and of the step's random keys.
        **options: Fields of `StepOptions`.

    Returns:
        `(state, step)`; `state, metrics = step(state, batch)`.

    Raises:
        PlanError: The plan does not fit model or devices, or cannot be settled; nothing has been
            allocated.
        InputError: The model holds variables that are not parameters; an argument is another
            thing, with the call that was meant; `dims` do not fit the model.

    Warns:
        PlanWarning: A mesh axis does nothing, or much of the parameters stays whole.
    """
    check_arguments(make_model, optimizer, loss)
    check_placing(devices, seed)
    facts = _facts(make_model, optimizer, loss, devices, dims, options)
    step = built(settle(as_plan(plan), facts), facts)
    warn_of_idle(step.bound, step.spec)
    return step.init(seed), step


def build_step(
    make_model: MakeModels,
    optimizer: Optimizer,
    loss: Loss,
    plan: Plan | Settled | str,
    *,
    devices: Sequence[jax.Device] | None = None,
    dims: GivenDims | None = None,
    **options: Any,
) -> Step:
    """The step of `boost` without a state: for restoring one, or compiling ahead.

    It decides nothing.

    Args:
        make_model: See `boost`.
        optimizer: See `boost`.
        loss: See `boost`.
        plan: That leaves nothing to `auto`, or the name of a preset; of a `Settled` the step's
            note has the reasons.
        devices: Default all.
        dims: See `boost`.
        **options: Fields of `StepOptions`.

    Raises:
        PlanError: The plan leaves something open, or does not fit model or devices.
        InputError: See `boost`.
    """
    check_arguments(make_model, optimizer, loss)
    check_placing(devices, 0)
    facts = _facts(make_model, optimizer, loss, devices, dims, options)
    return built(plan if isinstance(plan, Settled) else Settled(plan=as_plan(plan)), facts)


def _facts(
    make_model: MakeModels,
    optimizer: Optimizer,
    loss: Loss,
    devices: Sequence[jax.Device] | None,
    dims: GivenDims | None,
    options: dict[str, Any],
) -> Facts:
    return Facts(
        make_model=make_model,
        optimizer=optimizer,
        loss=loss,
        devices=devices,
        dims=dims,
        options=step_options(options),
    )


def built(settled: Settled, facts: Facts) -> Step:
    """The step of a settled plan.

    Raises:
        PlanError: The plan leaves something open, or does not fit model or devices.
    """
    settled.plan.check_budgets()
    check_settled(settled.plan)
    step = facts.step(settled.plan, settled.reasons)
    leaves = jax.tree.leaves(step.spec.infos), jax.tree.leaves(step.infos)
    line = cost_of_whole(step.bound, *leaves, step.layout)
    if line is not None:
        _LOG.warning(line)
    return step
