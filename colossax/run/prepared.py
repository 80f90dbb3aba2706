"""A run about to start."""

import dataclasses
from pathlib import Path
from typing import Any

from colossax.config import Plan
from colossax.planner.settling import Settled
from colossax.planner.task_step import settle_task, task_step
from colossax.processes.group import Group
from colossax.run.options import RunConfig, RunOptions
from colossax.run.run_dir import RunFolder, check_identity, find_run_folder
from colossax.step.step import Step
from colossax.tasks import Task

OFFLOADED = "offload"
"""Folder of a run's optimizer state on disk, in that of the run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run about to start: all checks passed, nothing written but caches."""

    task: Task
    config: RunConfig
    options: RunOptions
    group: Group
    settled: Settled
    step: Step
    folder: RunFolder
    identity: dict[str, Any]

    @property
    def plan(self) -> Plan:
        """The one that runs."""
        return self.settled.plan

    @property
    def asked(self) -> dict[str, Any]:
        """How the run was asked for, with the plan that runs."""
        return self.task.asked(self.plan)


def prepare(task: Task, config: RunConfig, options: RunOptions, group: Group) -> Prepared:
    """Check everything that can be refused, the quick things first."""

    def find() -> str:
        return str(find_run_folder(options.out, recipe=task.name, resume=options.resume).path)

    folder = RunFolder(path=Path(group.from_first(find)))
    devices = options.devices()
    settled = settle_task(task, config.plan, devices, agree=group.from_first)
    step = task_step(task, settled, devices, disk=folder.path / OFFLOADED)
    who = task.identity()
    if options.resume:
        group.together(lambda: check_identity(folder, who))
    return Prepared(
        task=task,
        config=config,
        options=options,
        group=group,
        settled=settled,
        step=step,
        folder=folder,
        identity=who,
    )
