"""One run of a task, from its plan to its last checkpoint, picture and completion."""

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from colossax.config import Plan, to_json
from colossax.errors import DamagedStoreError, InputError
from colossax.planner.flops import Yardstick, peak_flops
from colossax.planner.settling import Settled
from colossax.planner.task_step import settle_task, task_step
from colossax.processes.agreement import Gate, StopAgreement
from colossax.processes.group import Group
from colossax.processes.signals import StopSignals
from colossax.run.checkpointing import RunCheckpoints
from colossax.run.initial import initial_params
from colossax.run.loop import Hooks, Loop, Meter, Schedule
from colossax.run.plot import plot_losses
from colossax.run.progress import Screen
from colossax.run.records import Record, Records, finite, read_records, spelt
from colossax.run.run_dir import RunFolder, check_identity, find_run_folder
from colossax.step.step import Step
from colossax.tasks import Task
from colossax.typing import TrainState

OFFLOADED = "offload"
"""Folder of a run's optimizer state on disk, in that of the run."""


STEP_FIELDS = ("step", "loss", "grad_norm", "tokens", "tokens_per_s")
"""What is emitted of each step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How a task is run.

    Attributes:
        plan: How it is spread over devices; what it leaves to `auto` is settled first.
        steps: Optimizer steps in all, those before a resumption included.
        seed: Of the parameters and the step's random keys.
        validate_every: Steps between evaluations; 0 evaluates at the end alone.
        checkpoint_every: Steps between checkpoints; 0 saves at the end alone.
        keep: Checkpoints kept.
        init: Checkpoint whose parameters a new run starts from, in place of random ones.
    """

    plan: Plan = Plan()
    steps: int
    seed: int = 0
    validate_every: int = 0
    checkpoint_every: int = 0
    keep: int = 2
    init: str | None = None

    def __post_init__(self):
        least = {"steps": 1, "seed": 0, "validate_every": 0, "checkpoint_every": 0, "keep": 1}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise InputError(f"{name}: found {getattr(self, name)}; give {low} or more")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where a run happens and who listens; nothing here changes its losses.

    Attributes:
        out: The run's folder; None takes the next number under `runs/`.
        resume: Go on with the run in `out`.
        devices: Gives the devices; called when JAX may be asked.
        emit: Takes one record per step and the final one; None on all processes but the first.
    """

    out: str | None = None
    resume: bool = False
    devices: Callable[[], list[jax.Device]] = jax.devices
    emit: Callable[[Record], None] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended.

    Attributes:
        final: Its numbers.
        stopped_by: `SIGTERM` or `SIGINT` when it was told to stop, else None.
    """

    final: Record
    stopped_by: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Prepared:
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


def train(task: Task, config: RunConfig, options: RunOptions, group: Group) -> Outcome:
    """Train a task's model; every process of the group calls this alike.

    Raises:
        InputError: Something asked for cannot be done. Nothing has been written then.
    """
    run = _prepare(task, config, options, group)
    signals = StopSignals()
    with signals.installed():
        outcome = _train(run, signals)
    signals.close()
    return outcome


def _prepare(task: Task, config: RunConfig, options: RunOptions, group: Group) -> _Prepared:
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
    return _Prepared(
        task=task,
        config=config,
        options=options,
        group=group,
        settled=settled,
        step=step,
        folder=folder,
        identity=who,
    )


def _train(run: _Prepared, signals: StopSignals) -> Outcome:
    group = run.group
    screen = Screen(visible=group.first)
    checkpoints = _checkpoints(run, screen)
    start, state = _first_state(run, checkpoints, screen)
    gate = Gate(start)
    with contextlib.ExitStack() as stack:
        stack.enter_context(StopAgreement(group, signals, gate))
        stack.callback(screen.close)
        if group.first:
            run.folder.write(run.asked, run.identity)
        record = _recorder(run, start, screen, stack)
        _introduce(run, start, screen)
        batches = stack.enter_context(run.task.batches(run.step, start))
        loop = _loop(run, checkpoints, record, gate, screen)
        screen.start(steps=run.config.steps, done=start)
        state, done = loop.run(state, batches, start)
        screen.close()
        checkpoints.finish()
        stopped_by = gate.reason or signals.wish
        latest = checkpoints.latest()
        final = _final(run, loop, done=done, checkpoint=latest, stopped_by=stopped_by)
        if stopped_by is None and run.task.complete is not None:
            final["completion"] = run.task.complete(run.step, state["params"])
    if group.first:
        _conclude(run, final, screen)
    return Outcome(final=final, stopped_by=stopped_by)


def _checkpoints(run: _Prepared, screen: Screen) -> RunCheckpoints:
    documents = {
        "run": {"identity": run.identity, "config": run.asked},
        "plan": to_json(run.plan),
        **run.task.documents(),
    }
    return RunCheckpoints(
        run.folder.checkpoints,
        run.step,
        keep=run.config.keep,
        documents=documents,
        report=screen.note,
    )


def _first_state(
    run: _Prepared, checkpoints: RunCheckpoints, screen: Screen
) -> tuple[int, TrainState]:
    """Steps done and the state after them: restored, or fresh."""
    start = run.group.from_first(lambda: checkpoints.latest() if run.options.resume else None)
    if run.options.resume and (kept := _kept_on_disk(run, start, screen)) is not None:
        return kept
    if start is None:
        if run.options.resume:
            screen.note(f"{run.folder.path} holds no checkpoint yet; starting from the beginning")
        return 0, _fresh_state(run, screen)
    state = run.group.together(lambda: checkpoints.restore(start))
    screen.note(f"resumed from step {start} of {run.folder.path}")
    return start, state


def _fresh_state(run: _Prepared, screen: Screen) -> TrainState:
    """The state of a new run, its parameters random or those of a checkpoint."""
    path, seed = run.config.init, run.config.seed
    if path is None:
        return run.step.init(seed)
    params = run.group.together(lambda: initial_params(path, run.step))
    screen.note(f"parameters from {path}")
    return run.step.init_from(params, seed)


def _kept_on_disk(
    run: _Prepared, start: int | None, screen: Screen
) -> tuple[int, TrainState] | None:
    """Steps done and the state in the disk tier's file, where it is whole and newer."""
    disk = run.step.disk
    if disk is None:
        return None
    kept = disk.latest()
    if kept is None and disk.has_full_state and disk.path.exists():
        screen.note(f"'{disk.path}' holds no whole state; resuming from the last checkpoint")
    if kept is None or kept <= (start or 0):
        return None
    try:
        state = disk.restore()
    except DamagedStoreError as problem:
        screen.note(f"{problem}; resuming from the last checkpoint")
        return None
    screen.note(f"resumed from step {kept}, which {disk.path} holds")
    return kept, state


def _recorder(
    run: _Prepared, start: int, screen: Screen, stack: contextlib.ExitStack
) -> Callable[[Record], None]:
    """Where records go: files and whoever listens; nowhere on all processes but the first."""
    if not run.group.first:
        return lambda record: None
    files = Records(run.folder.path, from_step=start, report=screen.note)
    stack.callback(files.close)
    emit = run.options.emit

    def record(record: Record) -> None:
        files.write(record)
        if emit is not None and "loss" in record:
            emit(finite({name: record[name] for name in STEP_FIELDS}))

    return record


def _loop(
    run: _Prepared,
    checkpoints: RunCheckpoints,
    record: Callable[[Record], None],
    gate: Gate,
    screen: Screen,
) -> Loop:
    config, task, bound = run.config, run.task, run.step.bound
    device = bound.mesh.devices.flat[0]
    peak = peak_flops(device.device_kind, run.plan.precision.compute)
    yardstick = Yardstick(
        flops_per_token=task.flops // task.tokens,
        peak=None if peak is None else peak * bound.mesh.size,
    )
    hooks = Hooks(
        record=record,
        validate=lambda state: task.evaluated(run.step, state),
        save=checkpoints.save,
        progress=screen,
    )
    schedule = Schedule(
        steps=config.steps,
        validate_every=config.validate_every,
        checkpoint_every=config.checkpoint_every,
    )
    return Loop(run.step, schedule, hooks, gate, Meter(yardstick))


def _introduce(run: _Prepared, start: int, screen: Screen) -> None:
    task, bound = run.task, run.step.bound
    axes = [f"{axis}={size}" for axis, size in bound.mesh.shape.items() if size > 1]
    count = run.step.spec.parameter_count()
    screen.note(
        f"{task.name}: {count / 1e6:.2f} M parameters on {bound.mesh.size}"
        f" {bound.mesh.devices.flat[0].platform} device(s)"
        f"{' (' + ', '.join(axes) + ')' if axes else ''}"
    )
    if run.step.note is not None:
        screen.note(run.step.note)
    for line in task.introduction():
        screen.note(line)
    for name, value in task.baselines().items():
        screen.note(f"{spelt(name)}: {value:.4f} {task.unit}".rstrip())
    screen.note(
        f"steps {start + 1} to {run.config.steps} of {task.tokens:,} tokens into {run.folder.path}"
    )


def _final(
    run: _Prepared, loop: Loop, *, done: int, checkpoint: int | None, stopped_by: str | None
) -> Record:
    last = loop.last or {}
    return {
        "step": done,
        "loss": last.get("loss"),
        **(loop.evaluated or dict.fromkeys(run.task.evaluators)),
        **run.task.baselines(),
        "tokens": int(loop.meter.tokens),
        "tokens_per_s": round(loop.meter.tokens_per_s, 1),
        "mfu": loop.meter.mfu,
        "seconds": round(loop.meter.seconds, 3),
        "skipped": loop.meter.skipped,
        "parameters": run.step.spec.parameter_count(),
        "plan": run.plan.hash,
        "out": str(run.folder.path),
        "checkpoint": checkpoint,
        "stopped_by": stopped_by,
    }


def _conclude(run: _Prepared, final: Record, screen: Screen) -> None:
    """Draw the picture, tell the outcome."""
    plot_losses(
        read_records(run.folder.metrics),
        run.folder.picture,
        title=f"{run.task.name}: {final['parameters'] / 1e6:.2f} M parameters",
        unit=run.task.unit,
        baselines=run.task.baselines(),
    )
    if final["stopped_by"] is not None:
        screen.note(
            f"stopped by {final['stopped_by']} after step {final['step']}; go on with --resume"
        )
    else:
        for line in run.task.conclusion(final):
            screen.note(line)
    if final["mfu"] is not None:
        formula = f" ({run.task.flops_formula})" if run.task.flops_formula else ""
        screen.note(f"MFU {final['mfu']:.1%}{formula}")
    if final.get("completion"):
        screen.note(f"\n{final['completion']}\n")
    screen.note(f"checkpoints, metrics and loss.png are in {run.folder.path}")
    if run.options.emit is not None:
        run.options.emit({"final": finite(final)})
