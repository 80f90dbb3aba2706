"""`boost`: a training step from a user's own parts."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from colossax.config import Plan
from colossax.nn import MakeModel, describe
from colossax.optim import Optimizer
from colossax.planner.cpu_share import with_cpu_share
from colossax.planner.mlp_share import MLP_SHARE, wants_mlp_share, with_mlp_share
from colossax.planner.pipelined import PIPELINED, with_pipelined
from colossax.sharding import use
from colossax.step.loss import Loss
from colossax.step.offloaded.cpu_update import CPU_UPDATE
from colossax.step.step import Step, StepOptions
from colossax.typing import TrainState


def boost(
    make_model: MakeModel | Mapping[str, MakeModel],
    optimizer: Optimizer,
    loss: Loss,
    plan: Plan,
    *,
    devices: Sequence[jax.Device] | None = None,
    seed: int = 0,
    **options: Any,
) -> tuple[TrainState, Step]:
    """A fresh training state and the step that advances it, laid out by a plan.

    Args:
        make_model: `rngs -> nnx.Module`, parameters named by logical dims; or several such by
            name, `{"actor": ..., "critic": ...}`: the loss gets `Models`, and the state's
            `params` are `{"actor": ..., "critic": ...}`.
        optimizer: An Optax transformation, or `dims -> transformation` for those of
            `colossax.optim` that treat layers apart; or one for each model by name, whose
            `opt_state` is by name then. Gradients are clipped together.
        loss: `(model, batch) -> ({term: (total, weight, coefficient)}, metrics)`; see `Loss`.
        plan: How to spread it.
        devices: Default all.
        seed: Of the parameters and of the step's random keys.
        **options: Fields of `StepOptions`.

    Returns:
        `(state, step)`; `state, metrics = step(state, batch)`.

    Raises:
        PlanError: The plan does not fit model or devices; nothing has been allocated.
        InputError: The model holds variables that are not parameters.
    """
    step = build_step(make_model, optimizer, loss, plan, devices=devices, **options)
    return step.init(seed), step


def build_step(
    make_model: MakeModel | Mapping[str, MakeModel],
    optimizer: Optimizer,
    loss: Loss,
    plan: Plan,
    *,
    devices: Sequence[jax.Device] | None = None,
    **options: Any,
) -> Step:
    """The step of `boost` without a state: for restoring one, or compiling ahead."""
    plan.check_budgets()
    first = (jax.devices() if devices is None else devices)[0]
    plan, line = with_cpu_share(plan, optimizer, [first])
    plan, pipelined = with_pipelined(plan, first.platform, first.device_kind)
    decided = {CPU_UPDATE: line, PIPELINED: pipelined}
    decided = {setting: line for setting, line in decided.items() if line is not None}
    bound = plan.bind(devices)
    with use(bound):
        spec = describe(make_model)
    step = Step(spec, bound, optimizer, loss, StepOptions(**options), decided)
    if not wants_mlp_share(plan):
        return step

    def build(plain: Plan) -> Step:
        one = [bound.mesh.devices.flat[0]]
        return build_step(make_model, optimizer, loss, plain, devices=one, **options)

    plan, line = with_mlp_share(step, build)
    decided = {**decided, MLP_SHARE: line}
    return Step(spec, plan.bind(devices), optimizer, loss, step.options, decided)
