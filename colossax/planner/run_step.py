"""The step that a run's configuration asks for."""

from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from colossax.aot import Target
from colossax.config import Plan
from colossax.models import maker
from colossax.offload import Agree
from colossax.planner.building import build_step
from colossax.planner.fitting import Fitted, fit_offload
from colossax.step.microbatches import num_microbatches
from colossax.step.step import Step
from colossax.tasks.config import TrainConfig
from colossax.tasks.next_token import next_token_loss
from colossax.tasks.optimizer import make_optimizer
from colossax.typing import TEXT_BATCH_DIMS


def run_step(
    config: TrainConfig, devices: Sequence[jax.Device], *, disk: Path | None = None
) -> Step:
    """The step of a run, with its batch checked against the devices.

    Args:
        config: The run.
        devices: Where it would run.
        disk: Folder for optimizer state on disk; without one nothing can be run that has any.

    Raises:
        PlanError: Model, batch or devices do not fit the plan.
    """
    step = build_step(
        maker(config.model),
        make_optimizer(config.optimizer, config.schedule_steps),
        next_token_loss(z_loss=config.z_loss),
        config.plan,
        devices=devices,
        clip_norm=config.clip_norm,
        disk=disk,
        shapes=batch_shapes(config),
    )
    num_microbatches(step.bound, batch_shapes(config), TEXT_BATCH_DIMS)
    return step


def fit_run(
    config: TrainConfig,
    devices: Sequence[jax.Device],
    *,
    target: Target | None = None,
    agree: Agree = lambda make: make(),
) -> tuple[TrainConfig, Fitted | None]:
    """The run with shares in place of `plan.offload.auto`, and how they were found.

    Unchanged, and None, where the plan has shares already. Arguments are those of `fit_offload`.

    Raises:
        PlanError: A budget does not do, or model, batch or devices do not fit the plan.
    """
    if not config.plan.offload.auto:
        return config, None

    def make_step(plan: Plan) -> Step:
        return run_step(config.replace(plan=plan), devices)

    fitted = fit_offload(make_step, config.plan, batch_shapes(config), target=target, agree=agree)
    return config.replace(plan=fitted.plan), fitted


def batch_shapes(config: TrainConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of a run's global batch."""
    shape = (config.data.global_batch, config.data.seq_len)
    dtypes = {name: np.float32 if name == "weights" else np.int32 for name in TEXT_BATCH_DIMS}
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()}
