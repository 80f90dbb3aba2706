"""A run about to start."""

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from colossax.checkpoint.base import BASE
from colossax.config import Plan, to_json, user_path
from colossax.errors import InputError
from colossax.planner.task_step import settle_task, task_step
from colossax.processes.group import Group
from colossax.run.lock import RunLock
from colossax.run.options import Init, RunConfig, RunOptions
from colossax.run.origins import Origin, origins_of
from colossax.run.run_dir import RunFolder, check_identity, find_run_folder
from colossax.run.sources import settled_source
from colossax.run.trackers import check_trackers
from colossax.step.saving.records import MODEL
from colossax.step.step import Step
from colossax.tasks import Task
from colossax.typing import TrainState

OFFLOADED = "offload"
"""Folder of a run's optimizer state on disk, in that of the run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run about to start: all checks passed, nothing written but caches.

    Attributes:
        plan: The one that runs.
        state: What it starts from where it is not resumed; None makes a fresh one.
        begun: Steps that `state` had seen when the run was begun.
    """

    task: Task
    config: RunConfig
    options: RunOptions
    group: Group
    plan: Plan
    step: Step
    folder: RunFolder
    identity: dict[str, Any]
    state: TrainState | None = None
    begun: int = 0

    def at(self, folder: Path) -> "Prepared":
        """This run in another folder, with its file of the disk tier, which is not yet made."""
        disk, inside = self.step.disk, self.folder.path / OFFLOADED
        if disk is not None and disk.path.parent == inside:
            disk.path = folder / OFFLOADED / disk.path.name
        return dataclasses.replace(self, folder=RunFolder(path=folder))

    @property
    def documents(self) -> dict[str, Any]:
        """JSON values that each checkpoint holds."""
        return {
            "run": {"identity": self.identity, "config": self.asked},
            "plan": to_json(self.plan),
            **self.task.documents(),
            **self._base,
        }

    @functools.cached_property
    def _base(self) -> dict[str, Any]:
        """Of an adapter: which checkpoint it was trained beside.

        Raises:
            InputError: One of several models has an adapter, or the target of a drafter has one.
        """
        if self.config.init is None or not has_adapter(self.step, MODEL):
            return {}
        if (target := whole_base(self.step)) is not None:
            origin = self.group.together(self.origins)[target]
            if origin.base is not None:
                raise InputError(
                    f"init: {origin} is an adapter, and what is kept of a drafter's target is one"
                    " checkpoint; start from what colossax export --merge --as-checkpoint writes"
                )
            return {BASE: origin.document(self.folder.checkpoints)}
        names = self.step.spec.model_names
        if names and MODEL not in names:
            raise InputError(
                "adapter: a run trains one of a model that is alone, and this one has"
                f" {', '.join(names)}; save their states by step.save"
            )
        origins = self.group.together(self.origins)
        return {BASE: origins[MODEL].document(self.folder.checkpoints)}

    def origins(self) -> dict[str, Origin]:
        """What its models start from, of a run that starts from checkpoints."""
        init, names = self.config.init, self.step.spec.model_names
        assert init is not None
        target = whole_base(self.step)
        if target is not None and not isinstance(init, Mapping):
            init = {target: init}
        return origins_of(init, names, self.options.base)

    @property
    def asked(self) -> dict[str, Any]:
        """How the run was asked for, with the plan that runs."""
        return self.task.asked(self.plan)


def has_adapter(step: Step, among: str | None = None) -> bool:
    """Whether checkpoints of a step leave frozen parameters out.

    Args:
        step: Of the run.
        among: Of several models, the one that alone counts if it is there.
    """
    infos = jax.tree.leaves(step.spec.infos)
    alone = among in step.spec.model_names
    return any(info.of_base for info in infos if not alone or info.model == among)


def whole_base(step: Step) -> str | None:
    """Name of the model, of several, that is frozen and left out of checkpoints as a whole.

    Beside one that is stored as if it were alone there is none: what is frozen there is of the
    run's configuration, and who reads a checkpoint needs none of it.
    """
    infos = jax.tree.leaves(step.spec.infos)
    for name in () if MODEL in step.spec.model_names else step.spec.model_names:
        if all(info.of_base or info.noted for info in infos if info.model == name):
            return name
    return None


def _check_frozen(step: Step, init: Init | None) -> None:
    """Refuse frozen models, of several, that would begin random."""
    if not step.spec.model_names or isinstance(init, str | Path | tuple):
        return
    frozen = {info.model for info in jax.tree.leaves(step.spec.infos) if info.of_base}
    if missing := sorted(name for name in frozen - {*(init or {})} if name is not None):
        raise InputError(
            f"init: all or a part of '{missing[0]}' is frozen, and it begins random; give the"
            " checkpoint of a model with --init, or say by name what it starts from"
        )


def settle_folder(name: str, options: RunOptions, group: Group) -> tuple[RunOptions, RunFolder]:
    """The run's folder, and whether it is resumed; writes nothing.

    Raises:
        InputError: The folder does not fit what is asked, another run writes into it, or a tracker
            is not there.
    """

    def find() -> list[Any]:
        check_trackers(options.trackers)
        if options.out is not None and not options.take_over:
            RunLock(user_path(options.out, "--out")).check_free()
        folder = find_run_folder(options.out, recipe=name, resume=options.resume)
        return [str(folder.path), folder.holds_run]

    path, resume = group.from_first(find)
    return dataclasses.replace(options, resume=resume), RunFolder(path=Path(path))


def prepare(task: Task, config: RunConfig, options: RunOptions, group: Group) -> Prepared:
    """Check everything that can be refused, the quick things first."""

    options, folder = settle_folder(task.name, options, group)
    devices = options.devices()
    settled = settle_task(task, config.plan, devices, agree=group.from_first)
    step = task_step(task, settled, devices, disk=folder.path / OFFLOADED)
    if config.init is None and has_adapter(step) and MODEL not in step.spec.model_names:
        which = "adapter" if whole_base(step) is None else "drafter"
        raise InputError(
            f"{which}: it learns beside a model that is frozen, and this one begins random; give"
            " the checkpoint of a model with --init, such as colossax import writes"
        )
    who = task.identity()
    _check_frozen(step, config.init)
    if step.disk is not None:
        step.disk.owner = json.dumps(who, sort_keys=True)
    if options.resume:
        group.together(lambda: check_identity(folder, who))
    return Prepared(
        task=settled_source(task),
        config=config,
        options=options,
        group=group,
        plan=settled.plan,
        step=step,
        folder=folder,
        identity=who,
    )
