"""One run from its configuration to its last checkpoint, picture and completion."""

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from colossax.config import to_json
from colossax.errors import DamagedStoreError
from colossax.models import config_to_json
from colossax.planner.flops import MFU_FORMULA, Yardstick, peak_flops
from colossax.planner.run_step import run_step, settle_run
from colossax.processes.agreement import Gate, StopAgreement
from colossax.processes.group import Group
from colossax.processes.signals import StopSignals
from colossax.run.checkpointing import RunCheckpoints
from colossax.run.initial import initial_params, initial_tokenizer
from colossax.run.loop import Hooks, Loop, Meter, Schedule, mean_loss
from colossax.run.plot import plot_losses
from colossax.run.progress import Screen
from colossax.run.records import Record, Records, finite, read_records
from colossax.run.run_dir import RunFolder, check_identity, find_run_folder, identity
from colossax.step.step import Step
from colossax.tasks.config import TrainConfig, train_config_to_json
from colossax.tasks.text import Text, open_text
from colossax.typing import Params, TrainState

OFFLOADED = "offload"
"""Folder of a run's optimizer state on disk, in that of the run."""


STEP_FIELDS = ("step", "loss", "grad_norm", "tokens", "tokens_per_s")
"""What is emitted of each step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """A model at the end of a run, for whoever completes the sample prompt."""

    config: TrainConfig
    step: Step
    params: Params
    tokenizer: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where a run happens and who listens; nothing here changes its losses.

    Attributes:
        out: The run's folder; None takes the next number under `runs/`.
        resume: Go on with the run in `out`.
        devices: Gives the devices; called when JAX may be asked.
        emit: Takes one record per step and the final one; None on all processes but the first.
        complete: Continues the sample prompt; called on every process.
    """

    out: str | None = None
    resume: bool = False
    devices: Callable[[], list[jax.Device]] = jax.devices
    emit: Callable[[Record], None] | None = None
    complete: Callable[[Trained], str] | None = None


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
    """A run about to start: all checks passed, nothing written but caches.

    Attributes:
        config: With the plan that runs, whatever was left to `auto` decided.
    """

    config: TrainConfig
    options: RunOptions
    group: Group
    step: Step
    folder: RunFolder
    text: Text
    identity: dict[str, Any]


def train(config: TrainConfig, options: RunOptions, group: Group) -> Outcome:
    """Train a model; every process of the group calls this alike.

    Raises:
        InputError: Something asked for cannot be done. Nothing has been written then.
    """
    run = _prepare(config, options, group)
    signals = StopSignals()
    with signals.installed():
        outcome = _train(run, signals)
    signals.close()
    return outcome


def _prepare(config: TrainConfig, options: RunOptions, group: Group) -> _Prepared:
    """Check everything that can be refused, the quick things first."""

    def find() -> str:
        return str(find_run_folder(options.out, recipe=config.recipe, resume=options.resume).path)

    folder = RunFolder(path=Path(group.from_first(find)))
    if options.resume:
        config = _keep_schedule(config, folder)
    devices = options.devices()
    config, settled = settle_run(config, devices, agree=group.from_first)
    step = run_step(config, devices, disk=folder.path / OFFLOADED, reasons=settled.reasons)
    text = open_text(
        config.data,
        config.model,
        seed=config.seed,
        group=group,
        tokenizer=initial_tokenizer(config),
    )
    who = identity(config, text=text.fingerprint, tokenizer=text.tokenizer.fingerprint)
    if options.resume:
        group.together(lambda: check_identity(folder, who))
    return _Prepared(
        config=config,
        options=options,
        group=group,
        step=step,
        folder=folder,
        text=text,
        identity=who,
    )


def _keep_schedule(config: TrainConfig, folder: RunFolder) -> TrainConfig:
    """With the learning-rate schedule's length of the run that is resumed, unless one is asked."""
    if config.optimizer.schedule_steps is not None:
        return config
    length = folder.config().schedule_steps
    return config.replace(optimizer=dataclasses.replace(config.optimizer, schedule_steps=length))


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
            run.folder.write(run.config, run.identity)
        record = _recorder(run, start, screen, stack)
        _introduce(run, start, screen)
        batches = stack.enter_context(run.text.batches(run.step, start))
        loop = _loop(run, checkpoints, record, gate, screen)
        screen.start(steps=run.config.steps, done=start)
        state, done = loop.run(state, batches, start)
        screen.close()
        checkpoints.finish()
        stopped_by = gate.reason or signals.wish
        latest = checkpoints.latest()
        final = _final(run, loop, done=done, checkpoint=latest, stopped_by=stopped_by)
        if stopped_by is None:
            final["completion"] = _completion(run, state)
    if group.first:
        _conclude(run, final, screen)
    return Outcome(final=final, stopped_by=stopped_by)


def _checkpoints(run: _Prepared, screen: Screen) -> RunCheckpoints:
    config = run.config
    documents = {
        "run": {"identity": run.identity, "config": train_config_to_json(config)},
        "plan": to_json(config.plan),
        "model": config_to_json(config.model),
        "tokenizer": run.text.tokenizer.to_json(),
    }
    return RunCheckpoints(
        run.folder.checkpoints,
        run.step,
        keep=config.keep,
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
    config = run.config
    if config.init is None:
        return run.step.init(config.seed)
    params = run.group.together(lambda: initial_params(config, run.step))
    screen.note(f"parameters from {config.init}")
    return run.step.init_from(params, config.seed)


def _kept_on_disk(
    run: _Prepared, start: int | None, screen: Screen
) -> tuple[int, TrainState] | None:
    """Steps done and the state in the disk tier's file, where it is whole and newer."""
    disk = run.step.disk
    if disk is None:
        return None
    kept = disk.latest()
    if kept is None and disk.whole and disk.path.exists():
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
    config, bound = run.config, run.step.bound
    device = bound.mesh.devices.flat[0]
    peak = peak_flops(device.device_kind, config.plan.precision.compute)
    yardstick = Yardstick(
        flops_per_token=config.model.decoder().train_flops_per_token(config.data.seq_len),
        peak=None if peak is None else peak * bound.mesh.size,
    )
    hooks = Hooks(
        record=record,
        validate=lambda state: mean_loss(run.step.evaluate, state, run.text.held_out(run.step)),
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
    config, bound = run.config, run.step.bound
    axes = [f"{axis}={size}" for axis, size in bound.mesh.shape.items() if size > 1]
    count = run.step.spec.parameter_count()
    screen.note(
        f"{config.recipe}: {count / 1e6:.2f} M parameters on {bound.mesh.size}"
        f" {bound.mesh.devices.flat[0].platform} device(s)"
        f"{' (' + ', '.join(axes) + ')' if axes else ''}"
    )
    if run.step.note is not None:
        screen.note(run.step.note)
    screen.note(f"text: {run.text.description}")
    screen.note(f"unigram entropy: {run.text.unigram_entropy:.4f} nats per token")
    tokens = config.data.global_batch * config.data.seq_len
    screen.note(f"steps {start + 1} to {config.steps} of {tokens:,} tokens into {run.folder.path}")


def _final(
    run: _Prepared, loop: Loop, *, done: int, checkpoint: int | None, stopped_by: str | None
) -> Record:
    last = loop.last or {}
    return {
        "step": done,
        "loss": last.get("loss"),
        "validation_loss": loop.validation_loss,
        "unigram_entropy": run.text.unigram_entropy,
        "tokens": int(loop.meter.tokens),
        "tokens_per_s": round(loop.meter.tokens_per_s, 1),
        "mfu": loop.meter.mfu,
        "seconds": round(loop.meter.seconds, 3),
        "skipped": loop.meter.skipped,
        "parameters": run.step.spec.parameter_count(),
        "plan": run.config.plan.hash,
        "out": str(run.folder.path),
        "checkpoint": checkpoint,
        "stopped_by": stopped_by,
    }


def _completion(run: _Prepared, state: TrainState) -> str | None:
    """The sample prompt continued, on every process alike."""
    if run.options.complete is None or not run.config.sample.prompt:
        return None
    return run.options.complete(
        Trained(
            config=run.config,
            step=run.step,
            params=state["params"],
            tokenizer=run.text.tokenizer,
        )
    )


def _conclude(run: _Prepared, final: Record, screen: Screen) -> None:
    """Draw the picture, tell the outcome."""
    plot_losses(
        read_records(run.folder.metrics),
        run.folder.picture,
        title=f"{run.config.recipe}: {final['parameters'] / 1e6:.2f} M parameters",
        unigram_entropy=run.text.unigram_entropy,
    )
    if final["stopped_by"] is not None:
        screen.note(
            f"stopped by {final['stopped_by']} after step {final['step']}; go on with --resume"
        )
    elif final["validation_loss"] is not None:
        below = final["unigram_entropy"] - final["validation_loss"]
        side = "below" if below >= 0 else "above"
        screen.note(
            f"validation loss {final['validation_loss']:.4f}, {abs(below):.4f} nats {side} the"
            f" unigram entropy {final['unigram_entropy']:.4f}"
        )
    if final["mfu"] is not None:
        screen.note(f"MFU {final['mfu']:.1%} ({MFU_FORMULA})")
    if final.get("completion"):
        screen.note(f"\n{final['completion']}\n")
    screen.note(f"checkpoints, metrics and loss.png are in {run.folder.path}")
    if run.options.emit is not None:
        run.options.emit({"final": finite(final)})
