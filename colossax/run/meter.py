"""Speed and utilisation of a run, read from the metrics of its steps."""

import time

from colossax.planner.flops import Yardstick
from colossax.run.records import Record
from colossax.typing import Metrics

_READ = ("loss", "grad_norm", "tokens", "skipped")
"""Metrics that are read each step, by `item`: `float` takes three times as long."""


class Meter:
    """Turns metrics on the device into numbers, and times into speeds."""

    def __init__(self, yardstick: Yardstick):
        self.yardstick = yardstick
        self.tokens = 0.0
        self.seconds = 0.0
        self.skipped = 0
        self.skipped_in_a_row = 0
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
        fine = int(values["skipped"]) == self.skipped
        self.skipped_in_a_row = 0 if fine else self.skipped_in_a_row + 1
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
