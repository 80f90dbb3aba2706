"""One run of a task, from its plan to its last checkpoint, picture and completion.

The device never waits for Python: the metrics of a step are read while the next one runs.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from colossax.processes.agreement import Gate, StopAgreement
from colossax.processes.group import Group
from colossax.processes.signals import StopSignals
from colossax.run.around import Around, emitter, recorder, records_of
from colossax.run.ending import LOST, clear_old_place, lost, not_finite, unsaved, why_skipped
from colossax.run.holding import held
from colossax.run.initial import first_state
from colossax.run.lock import RunLock
from colossax.run.meter import Meter, local_devices, with_injected_rate, yardstick_of
from colossax.run.options import Outcome, RunConfig, RunOptions
from colossax.run.prepared import Prepared, prepare
from colossax.run.progress import Progress, Screen
from colossax.run.records import Record, finite, read_records, spelt
from colossax.run.run_dir import RunFolder, find_run_folder
from colossax.run.summary import conclude, introduce, parameters
from colossax.run.unfinished import Unfinished
from colossax.tasks import Task
from colossax.typing import Batch, Metrics, TrainState

Reported = tuple[int, Metrics]

StepFunction = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


def train(task: Task, config: RunConfig, options: RunOptions, group: Group) -> Outcome:
    """Train a task's model; every process of the group calls this alike.

    Raises:
        InputError: Something asked for cannot be done. Nothing has been written then.
    """
    return run_prepared(prepare(task, config, options, group))[1]


def run_prepared(run: Prepared) -> tuple[TrainState, Outcome]:
    """The run, and the state that it ends with.

    Raises:
        InputError: See `train`.
    """
    signals = StopSignals()

    def check(folder: Path) -> object:
        return find_run_folder(str(folder), recipe="", resume=run.options.resume)

    def another() -> Path:
        return find_run_folder(None, recipe=run.task.name, resume=False).path

    numbered = run.options.out is None
    with (
        signals.installed(),
        held(
            run.folder.path,
            run.group,
            by_force=run.options.take_over and not numbered,
            check=check,
            on_lost=lambda: signals.stop(LOST),
            another=another if numbered else None,
        ) as lock,
    ):
        ended = _train(run.at(lock.folder), signals, lock)
        if lock.lost is not None:
            clear_old_place(RunFolder(path=lock.folder))
    signals.close()
    return ended


def _train(run: Prepared, signals: StopSignals, lock: RunLock) -> tuple[TrainState, Outcome]:
    group = run.group
    screen = Screen(visible=group.first, log=run.folder.log)
    around, emit = Around(run, screen, lock), emitter(run, screen)
    start, state, left = first_state(run, around.checkpoints, screen)
    around.callbacks.start(state)
    if run.options.resume and around.checkpoints.holds(start):
        around.callbacks.resume(around.checkpoints, start)
        if start >= run.config.steps or around.callbacks.ended is not None:
            outcome = _finished_before(run, around, start, screen)
            emit({"final": finite(outcome.final)})
            return state, outcome
    files = group.together(lambda: records_of(run, start, left, screen))
    gate = Gate(start)
    with contextlib.ExitStack() as stack:
        agreement = stack.enter_context(StopAgreement(group, signals, gate))
        stack.callback(screen.close)
        if files is not None:
            stack.callback(files.close)
            around.record = recorder(files, emit, lock)
        introduce(run, start, screen)
        assert callable(run.task.batches), "a source is settled when a run is prepared"
        batches = stack.enter_context(run.task.batches(run.step, start))
        loop = _loop(run, around, gate, screen, skipped=state["skipped"].item())
        screen.start(steps=run.config.steps, done=start, counted=run.task.counted)
        state, done = loop.run(state, batches, start, left)
        screen.close()
        around.finish()
        checkpoints = around.checkpoints
        # All finish or none: to the gate a step after that of the last evaluation.
        stopped_by = None if gate.enter(done + 1) else gate.reason
        latest = checkpoints.latest()
        final = _final(run, around, loop, done=done, checkpoint=latest, stopped_by=stopped_by)
        failure = not_finite(run, loop, state, latest, steps=done - start, stopped_by=stopped_by)
        if failure is None and stopped_by is None and run.task.complete is not None:
            final["completion"] = run.task.complete(run.step, run.task.judged(state)["params"])
        failure = lost(lock, done, stopped_by) or failure
        if (done > start or left is not None) and not checkpoints.holds(done):
            failure = failure or unsaved(run, done, latest, stopped_by)
        agreement.failure = failure
    if (failure := failure or agreement.failure_of_first) is not None:
        final["failure"] = failure
    if group.first:
        conclude(run, final, screen, writable=lock.check() is None)
        emit({"final": finite(final)})
    return state, Outcome(final=final, stopped_by=stopped_by, failure=failure)


def _finished_before(run: Prepared, around: Around, start: int, screen: Screen) -> Outcome:
    """Say that a resumed run has nothing left to do; nothing is written."""
    ended = around.callbacks.ended
    why = f"its {start} steps are done" if ended is None else f"{ended['by']}: {ended['why']}"
    advice = "ask for more with --steps" if ended is None else f"leave {ended['by']} out to go on"
    screen.note(f"{run.folder.path} is finished ({why}); nothing is changed; {advice}")
    loop = _loop(run, around, Gate(start), screen)
    evaluated = None
    for record in read_records(run.folder.metrics):
        if "loss" in record:
            loop.last = record
        else:
            # A step's evaluation and what callbacks log of it are records of their own.
            known = loop.evaluated if record["step"] == evaluated else {}
            evaluated = record["step"]
            loop.evaluated = {**known, **{n: x for n, x in record.items() if n != "step"}}
    final = _final(run, around, loop, done=start, checkpoint=start, stopped_by=None)
    return Outcome(final=final, stopped_by=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hooks:
    """What the loop calls out to.

    Attributes:
        record: Takes each step's and each validation's numbers; of use on process 0 alone.
        validate: Metrics of a state, by name.
        save: Starts saving a state; the state may be donated once it returns.
        progress: For people.
        call: Calls the callbacks with `(state, done, metrics, evaluated)`; gives the state to go on
            with, and what is known of it then.
        ended: Says whether one of them ended the run.
        keep: Saves a state before an error of the batches ends the run, where it can be.
    """

    record: Callable[[Record], None]
    validate: Callable[[TrainState], Mapping[str, float]]
    save: Callable[[TrainState, int], None]
    progress: Progress | Screen
    call: Callable[
        [TrainState, int, Metrics, Mapping[str, float]], tuple[TrainState, Mapping[str, float]]
    ] = lambda state, done, metrics, evaluated: (state, evaluated)
    ended: Callable[[], bool] = lambda: False
    keep: Callable[[TrainState, int], None] = lambda state, done: None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """When a run does what: step counts, 0 for never before the end."""

    steps: int
    validate_every: int
    checkpoint_every: int
    stop_after_skipped: int = 0


class Loop:
    """Runs steps from where a state stands to the end, or to where the gate ends them."""

    def __init__(
        self, step: StepFunction, schedule: Schedule, hooks: Hooks, gate: Gate, meter: Meter
    ):
        self._step = step
        self._schedule = schedule
        self._hooks = hooks
        self._gate = gate
        self.meter = meter
        self.evaluated: Mapping[str, float] = {}
        """What the last validation found."""
        self.last: Record | None = None
        self.last_batch: Batch = {}

    @property
    def hopeless(self) -> bool:
        """Whether as many steps in a row were skipped as end the run."""
        return self._skips_left <= 0

    @property
    def _skips_left(self) -> int | float:
        return (self._schedule.stop_after_skipped or math.inf) - self.meter.not_finite_in_a_row

    def run(
        self,
        state: TrainState,
        batches: Iterator[Batch],
        start: int,
        left: Unfinished | None = None,
    ) -> tuple[TrainState, int]:
        """Train; the state given is donated.

        Args:
            state: As it is after `start` steps.
            batches: From batch `start` on.
            start: Steps already done.
            left: What was left undone of the last of them, in no checkpoint; made up for first.

        Returns:
            The last state, and how many steps it has seen.
        """
        pending: Reported | None = None
        done, saved = start, start if left is None else None
        metrics: Metrics = {}
        validated = None if left is None else self._made_up_for(left, state, start)
        if self.hopeless:
            return state, done
        for index in range(start, self._schedule.steps):
            if not self._gate.enter(index):
                break
            try:
                with self.meter.waiting():
                    batch = next(batches, None)
            except Exception:  # whatever they raise, it goes on up when what is done is saved
                self._report(pending)
                if saved != done and not self.meter.not_finite_in_a_row:
                    self._hooks.keep(state, done)
                raise
            if batch is None:
                self._hooks.progress.note(f"the batches ended after step {done}")
                break
            self.last_batch = batch
            if index > start:  # the first is compiled when it is called
                self.meter.start()
            state, metrics = self._step(state, batch)
            self.meter.start()
            self._report(pending)
            pending, done, evaluated = (index + 1, metrics), index + 1, {}
            if self._skips_left <= 1:
                self._report(pending)
                pending = None
                if self.hopeless:
                    return state, done
            last = done == self._schedule.steps and self._evaluates_at_the_end(done)
            if last or self._due(self._schedule.validate_every, done):
                self._report(pending)
                pending, validated = None, done
                evaluated = self._validate(state, done)
            state, self.evaluated = self._called(state, done, metrics, evaluated)
            if self._hooks.ended():
                break
            if self._due(self._schedule.checkpoint_every, done):
                # The records up to a checkpoint are written before it: a run that is killed
                # and resumed from it would lack them for ever.
                self._report(pending)
                pending = None
                # Among skipped steps a checkpoint would push the last good one out.
                if not self.meter.not_finite_in_a_row:
                    self._save(state, done)
                    saved = done
        self._report(pending)
        if validated != done and self._evaluates_at_the_end(done):
            state = self._evaluated_at_the_end(state, done, metrics)
        if saved != done:
            self._save(state, done)
        return state, done

    def _made_up_for(self, left: Unfinished, state: TrainState, start: int) -> int | None:
        """Record what was not, evaluate what was due; the step if it has been evaluated."""
        self.last, self.evaluated = left.last, left.evaluated
        for step, numbers in left.metrics.items():
            self.last = self.meter.recalled(step, numbers)
            self._hooks.record(self.last)
        self.meter.skipped_in_a_row = left.skipped_in_a_row
        self.meter.not_finite_in_a_row = left.skipped_in_a_row - left.overflows_in_a_row
        due = self._due(self._schedule.validate_every, start)
        if due and not self.evaluated and not self.hopeless:
            self._validate(state, start)
        return start if self.evaluated else None

    def _evaluates_at_the_end(self, done: int) -> bool:
        """Whether all processes evaluate the last state: to the gate, one step more."""
        return self._gate.enter(done)

    def _evaluated_at_the_end(self, state: TrainState, done: int, metrics: Metrics) -> TrainState:
        """The state that callbacks leave that see the evaluation; of no step there is none."""
        evaluated = self._validate(state, done)
        if evaluated and metrics:
            state, self.evaluated = self._called(state, done, metrics, evaluated)
        return state

    def _due(self, every: int, done: int) -> bool:
        return bool(every) and done % every == 0 and done != self._schedule.steps

    def _report(self, pending: Reported | None) -> None:
        if pending is None:
            return
        step, metrics = pending
        skipped = self.meter.skipped
        record = self.last = self.meter.read(step, metrics)
        self._hooks.record(record)
        show = self._hooks.progress
        show.step(step, record["loss"], record["tokens_per_s"], record.get("mfu"))
        if self.meter.skipped > skipped:
            why, count = why_skipped(record), self.meter.skipped
            show.note(f"step {step} was skipped: {why} ({count} so far)")

    def _called(
        self, state: TrainState, done: int, metrics: Metrics, evaluated: Mapping[str, float]
    ) -> tuple[TrainState, Mapping[str, float]]:
        """The state that callbacks leave, and what was last known of one."""
        state, found = self._hooks.call(state, done, metrics, evaluated)
        return state, found or self.evaluated

    def _validate(self, state: TrainState, done: int) -> Mapping[str, float]:
        self.evaluated = self._hooks.validate(state)
        if self.evaluated:
            self._hooks.record({"step": done, **self.evaluated})
            shown = [f"{spelt(name)} {value:.4f}" for name, value in self.evaluated.items()]
            self._hooks.progress.note(f"step {done}: {', '.join(shown)}")
        self.meter.pause()
        return self.evaluated

    def _save(self, state: TrainState, done: int) -> None:
        self._hooks.save(state, done)
        self.meter.pause()


def _loop(run: Prepared, around: Around, gate: Gate, screen: Screen, *, skipped: int = 0) -> Loop:
    config, task = run.config, run.task
    hooks = Hooks(
        record=around.record,
        validate=lambda state: around.evaluate(run.task.judged(state)),
        save=around.checkpoints.save,
        progress=screen,
        call=around.callbacks,
        ended=lambda: around.callbacks.ended is not None,
        keep=around.keep,
    )
    schedule = Schedule(
        steps=config.steps,
        validate_every=config.validate_every,
        checkpoint_every=config.checkpoint_every,
        stop_after_skipped=config.stop_after_skipped,
    )
    meter = Meter(
        yardstick_of(run),
        rate=task.learning_rate,
        devices=local_devices(run.step),
        skipped=skipped,
        least_scale=run.plan.precision.loss_scale.minimum,
    )
    return Loop(with_injected_rate(run.step), schedule, hooks, gate, meter)


def _final(
    run: Prepared,
    around: Around,
    loop: Loop,
    *,
    done: int,
    checkpoint: int | None,
    stopped_by: str | None,
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
        **parameters(run.step),
        "plan": run.plan.hash,
        "out": str(run.folder.path),
        "checkpoint": checkpoint,
        "stopped_by": stopped_by,
        "ended_by": around.callbacks.ended,
    }
