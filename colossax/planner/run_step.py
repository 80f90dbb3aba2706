"""The step that a run's configuration asks for."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import jax
import numpy as np

from colossax.aot import Target
from colossax.models import maker
from colossax.offload import Agree
from colossax.planner.building import built
from colossax.planner.settling import Facts, Settled, settle
from colossax.step.step import Step, StepOptions
from colossax.tasks.config import TrainConfig
from colossax.tasks.next_token import next_token_loss
from colossax.tasks.optimizer import make_optimizer
from colossax.typing import TEXT_BATCH_DIMS


def run_facts(
    config: TrainConfig,
    devices: Sequence[jax.Device],
    *,
    target: Target | None = None,
    agree: Agree = lambda make: make(),
) -> Facts:
    """What decides a run's plan; arguments are those of `Facts`."""
    return Facts(
        make_model=maker(config.model),
        optimizer=make_optimizer(config.optimizer, config.schedule_steps),
        loss=next_token_loss(z_loss=config.z_loss),
        options=StepOptions(clip_norm=config.clip_norm, shapes=batch_shapes(config)),
        devices=devices,
        target=target,
        agree=agree,
    )


def settle_run(
    config: TrainConfig,
    devices: Sequence[jax.Device],
    *,
    target: Target | None = None,
    agree: Agree = lambda make: make(),
) -> tuple[TrainConfig, Settled]:
    """The run with its plan settled, and how; see `settle`."""
    settled = settle(config.plan, run_facts(config, devices, target=target, agree=agree))
    return config.replace(plan=settled.plan), settled


def run_step(
    config: TrainConfig,
    devices: Sequence[jax.Device],
    *,
    disk: Path | None = None,
    reasons: Mapping[str, str] = MappingProxyType({}),
) -> Step:
    """The step of a run, with its batch checked against the devices.

    Args:
        config: The run; its plan leaves nothing open.
        devices: Where it would run.
        disk: Folder for optimizer state on disk; without one nothing can be run that has any.
        reasons: Why the plan is as it is.

    Raises:
        PlanError: Model, batch or devices do not fit the plan, or it leaves something open.
    """
    facts = run_facts(config, devices)
    facts = dataclasses.replace(facts, options=dataclasses.replace(facts.options, disk=disk))
    return built(Settled(plan=config.plan, reasons=reasons), facts)


def batch_shapes(config: TrainConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of a run's global batch."""
    shape = (config.data.global_batch, config.data.seq_len)
    dtypes = {name: np.float32 if name == "weights" else np.int32 for name in TEXT_BATCH_DIMS}
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()}
