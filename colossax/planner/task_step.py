"""The step of a task, and its plan settled."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax

from colossax.aot import Target
from colossax.config import Plan
from colossax.offload import Agree
from colossax.planner.building import built
from colossax.planner.deciding.settling import Facts, Settled, settle
from colossax.step.step import Step
from colossax.tasks import Task


def settle_task(
    task: Task,
    plan: Plan,
    devices: Sequence[jax.Device],
    *,
    target: Target | None = None,
    agree: Agree = lambda make: make(),
) -> Settled:
    """What the plan of a task leaves open, decided; see `settle` and `Facts`."""
    facts = dataclasses.replace(_facts(task, devices), target=target, agree=agree)
    return settle(plan, facts)


def task_step(
    task: Task, plan: Plan | Settled, devices: Sequence[jax.Device], *, disk: Path | None = None
) -> Step:
    """The step of a task, with its batch checked against the devices.

    Args:
        task: The task.
        plan: That leaves nothing open.
        devices: Where it would run.
        disk: Folder for optimizer state on disk; without one nothing can be run that has any.

    Raises:
        PlanError: Model, batch or devices do not fit the plan, or it leaves something open.
    """
    settled = plan if isinstance(plan, Settled) else Settled(plan=plan)
    return built(settled, _facts(task, devices, disk=disk))


def _facts(task: Task, devices: Sequence[jax.Device], *, disk: Path | None = None) -> Facts:
    return Facts(
        make_model=task.make_model,
        optimizer=task.optimizer,
        loss=task.loss,
        options=dataclasses.replace(task.options, shapes=task.shapes, disk=disk),
        devices=devices,
        dims=task.dims,
        recipe=task.name,
    )
