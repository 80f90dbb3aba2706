"""The training loop: batches in, steps, records, validations and checkpoints out.

The device never waits for Python: the metrics of a step are read while the next one runs.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping

from colossax.planner.flops import Yardstick
from colossax.processes.agreement import Gate
from colossax.run.progress import Progress, Screen
from colossax.run.records import Record, spelt
from colossax.typing import Batch, Metrics, TrainState

_READ = ("loss", "grad_norm", "tokens", "skipped")
"""Metrics that are read each step, by `item`: `float` takes three times as long."""

Reported = tuple[int, Metrics]

StepFunction = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hooks:
    """What the loop calls out to.

    Attributes:
        record: Takes each step's and each validation's numbers; of use on process 0 alone.
        validate: Metrics of a state, by name.
        save: Starts saving a state; the state may be donated once it returns.
        progress: For people.
    """

    record: Callable[[Record], None]
    validate: Callable[[TrainState], Mapping[str, float]]
    save: Callable[[TrainState, int], None]
    progress: Progress | Screen


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """When a run does what: step counts, 0 for never before the end."""

    steps: int
    validate_every: int
    checkpoint_every: int


class Meter:
    """Turns metrics on the device into numbers, and times into speeds."""

    def __init__(self, yardstick: Yardstick):
        self.yardstick = yardstick
        self.tokens = 0.0
        self.seconds = 0.0
        self.skipped = 0
        self._since: float | None = None

    def start(self) -> None:
        """Count time from here, unless it is being counted."""
        if self._since is None:
            self._since = time.perf_counter()

    def pause(self) -> None:
        """What follows is no training."""
        self._since = None

    def read(self, step: int, metrics: Metrics) -> Record:
        """The numbers of a step; waits until the device has finished it."""
        values = {name: metrics[name].item() for name in _READ}
        now = time.perf_counter()
        seconds = now - (self._since or now)
        self._since = now
        self.tokens += values["tokens"]
        self.seconds += seconds
        self.skipped = int(values["skipped"])
        speed = values["tokens"] / seconds if seconds else 0.0
        record: Record = {"step": step, "loss": values["loss"], "grad_norm": values["grad_norm"]}
        record |= {"tokens": int(values["tokens"]), "tokens_per_s": round(speed, 1)}
        mfu = self.yardstick.mfu(speed)
        return record if mfu is None else {**record, "mfu": round(mfu, 4)}

    @property
    def tokens_per_s(self) -> float:
        """Over all steps read, validations and checkpoints not counted."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def mfu(self) -> float | None:
        """Share of the devices' peak over all steps read; None when it is unknown."""
        return self.yardstick.mfu(self.tokens_per_s)


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

    def run(
        self, state: TrainState, batches: Iterator[Batch], start: int
    ) -> tuple[TrainState, int]:
        """Train; the state given is donated.

        Args:
            state: As it is after `start` steps.
            batches: From batch `start` on.
            start: Steps already done.

        Returns:
            The last state, and how many steps it has seen.
        """
        pending: Reported | None = None
        done = saved = start
        for index in range(start, self._schedule.steps):
            if not self._gate.enter(index):
                break
            state, metrics = self._step(state, next(batches))
            self.meter.start()
            self._report(pending)
            pending, done = (index + 1, metrics), index + 1
            if self._due(self._schedule.validate_every, done):
                pending = self._report(pending)
                self._validate(state, done)
            if self._due(self._schedule.checkpoint_every, done):
                # The records up to a checkpoint are written before it: a run that is killed
                # and resumed from it would lack them for ever.
                pending = self._report(pending)
                self._save(state, done)
                saved = done
        self._report(pending)
        if self._gate.reason is None:
            self._validate(state, done)
        if saved != done:
            self._save(state, done)
        return state, done

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
            show.note(
                f"step {step} was skipped: its loss or gradient norm is not finite"
                f" ({self.meter.skipped} so far)"
            )

    def _validate(self, state: TrainState, done: int) -> None:
        self.evaluated = self._hooks.validate(state)
        if self.evaluated:
            self._hooks.record({"step": done, **self.evaluated})
            shown = [f"{spelt(name)} {value:.4f}" for name, value in self.evaluated.items()]
            self._hooks.progress.note(f"step {done}: {', '.join(shown)}")
        self.meter.pause()

    def _save(self, state: TrainState, done: int) -> None:
        self._hooks.save(state, done)
        self.meter.pause()
