"""Speed and utilisation of a run, read from the metrics of its steps."""

import contextlib
import functools
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from colossax.planner.counting.flops import Yardstick, peak_flops
from colossax.run.experts import experts_record
from colossax.run.hyperparameters import hyperparameters
from colossax.run.prepared import Prepared
from colossax.run.records import Record
from colossax.step.gradients.loss_scale import LOSS_SCALE
from colossax.step.step import Step
from colossax.step.updaters import RECORDED
from colossax.typing import Batch, Metrics, TrainState

_RATE = "learning_rate"


class Meter:
    """Turns metrics on the device into numbers, and times into speeds."""

    def __init__(
        self,
        yardstick: Yardstick,
        *,
        rate: Callable[[int], Any] | None = None,
        devices: Sequence[jax.Device] = (),
        skipped: int = 0,
        least_scale: float = 0.0,
    ):
        """Count from where a state stands.

        Args:
            yardstick: What turns tokens per second into a share of the peak.
            rate: The learning rate after so many updates, where it is known.
            devices: Those of this process, whose memory is told.
            skipped: Steps that were skipped before.
            least_scale: Of the loss; gradients that overflow above it are no sign of a run that
                is not finite.
        """
        self.yardstick = yardstick
        self.tokens = 0.0
        self.seconds = 0.0
        self.skipped = skipped
        self.skipped_in_a_row = 0
        self.not_finite_in_a_row = 0
        """Likewise, but for those of which a lower scale of the loss is the cure."""
        self._least_scale = least_scale
        self._since: float | None = None
        self._rate = None if rate is None else _Rates(rate)
        self._devices = devices
        self._waits: deque[float] = deque()

    def start(self) -> None:
        """Count time from here, unless it is being counted."""
        if self._since is None:
            self._since = time.perf_counter()

    def pause(self) -> None:
        """What follows is no training."""
        self._since = None

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count what is inside as waiting for the next step's data."""
        since = time.perf_counter()
        yield
        self._waits.append(time.perf_counter() - since)

    def read(self, step: int, metrics: Metrics) -> Record:
        """The numbers of a step; waits until the device has finished it."""
        values = {name: metrics[name].item() for name in RECORDED}  # `float` takes thrice as long
        now = time.perf_counter()
        seconds = now - (self._since or now)
        self._since = now
        self.tokens += values["tokens"]
        self.seconds += seconds
        scale = {LOSS_SCALE: metrics[LOSS_SCALE].item()} if LOSS_SCALE in metrics else {}
        fine = int(values["skipped"]) == self.skipped
        self.skipped_in_a_row = 0 if fine else self.skipped_in_a_row + 1
        if fine:
            self.not_finite_in_a_row = 0
        elif not overflowed({**values, **scale}, self._least_scale):
            self.not_finite_in_a_row += 1
        self.skipped = int(values["skipped"])
        speed = values["tokens"] / seconds if seconds else 0.0
        record: Record = {"step": step, "loss": values["loss"], "grad_norm": values["grad_norm"]}
        record |= {"tokens": int(values["tokens"]), "tokens_per_s": round(speed, 1)}
        record |= {"step_seconds": round(seconds, 6), **self._around(step, metrics, values)}
        record |= {**scale, **experts_record(step, metrics)}
        mfu = self.yardstick.mfu(speed)
        return record if mfu is None else {**record, "mfu": round(mfu, 4)}

    def recalled(self, step: int, values: Mapping[str, float]) -> Record:
        """The numbers of a step of a process before this one; nobody knows how long it took."""
        unknown = {"tokens_per_s": math.nan, "step_seconds": math.nan}
        known = {"step": step, "loss": values["loss"], "grad_norm": values["grad_norm"]}
        return {**known, "tokens": int(values["tokens"]), **unknown, **self._rate_of(step, values)}

    def _rate_of(self, step: int, values: Mapping[str, float]) -> Record:
        if self._rate is None:
            return {}
        updates = step - 1 - int(values["skipped"]) + was_skipped(values)
        return {_RATE: self._rate(updates)}

    def _around(self, step: int, metrics: Metrics, values: Record) -> Record:
        """Learning rate, wait for data, memory in use: what of it is known."""
        given = _RATE in metrics
        found = {_RATE: metrics[_RATE].item()} if given else self._rate_of(step, values)
        if self._waits:
            found["data_seconds"] = round(self._waits.popleft(), 6)
        return found | memory_in_use(self._devices)

    @property
    def tokens_per_s(self) -> float:
        """Over all steps read, validations and checkpoints not counted."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def mfu(self) -> float | None:
        """Share of the devices' peak over all steps read; None when it is unknown."""
        return self.yardstick.mfu(self.tokens_per_s)


class _Rates:
    """Learning rates as numbers, computed many at a time where JAX can trace what gives them."""

    _AT_ONCE = 1024

    def __init__(self, rate: Callable[[int], Any]):
        self._rate, self._many = rate, jax.jit(jax.vmap(rate))
        self._chunk = functools.lru_cache(maxsize=2)(self._computed)

    def __call__(self, updates: int) -> float:
        chunk, at = divmod(updates, self._AT_ONCE)
        rates = self._chunk(chunk)
        return float(self._rate(updates) if rates is None else rates[at])

    def _computed(self, chunk: int) -> np.ndarray | None:
        first = chunk * self._AT_ONCE
        counts = jnp.arange(first, first + self._AT_ONCE)
        try:
            return np.broadcast_to(np.asarray(self._many(counts)), (self._AT_ONCE,))
        except Exception:  # noqa: BLE001 (plain Python fails under tracing in any way)
            return None


def was_skipped(numbers: Mapping[str, Any]) -> bool:
    """Whether a step was, by its metrics or its record, where None is what is not finite."""
    judged = (numbers.get("loss"), numbers.get("grad_norm"))
    return not all(number is not None and math.isfinite(number) for number in judged)


def overflowed(numbers: Mapping[str, Any], least_scale: float) -> bool:
    """Whether a skipped step's gradients overflowed at a scale of the loss that can be lower.

    Args:
        numbers: Its metrics or its record.
        least_scale: What the scale never falls below.
    """
    loss, scale = numbers.get("loss"), numbers.get(LOSS_SCALE)
    return scale is not None and scale > least_scale and loss is not None and math.isfinite(loss)


def memory_in_use(devices: Sequence[Any]) -> Record:
    """`device_bytes`, the most of any of these devices, and `host_bytes` of this process.

    What the system or the device does not tell is left out; CPUs are no devices of their own.
    """
    found: Record = {}
    stats = [device.memory_stats() for device in devices if device.platform != "cpu"]
    used = [one["bytes_in_use"] for one in stats if one and "bytes_in_use" in one]
    if used:
        found["device_bytes"] = max(used)
    with contextlib.suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        found["host_bytes"] = pages * os.sysconf("SC_PAGE_SIZE")
    return found


def yardstick_of(run: Prepared) -> Yardstick:
    """What is known of a run's FLOPs."""
    task, mesh = run.task, run.step.bound.mesh
    if not task.flops or not task.tokens:
        return Yardstick(flops_per_token=0, peak=None)
    peak = peak_flops(mesh.devices.flat[0].device_kind, run.plan.precision.multiplies_in)
    return Yardstick(
        flops_per_token=task.flops // task.tokens,
        peak=None if peak is None else peak * mesh.size,
    )


def local_devices(step: Step) -> list[jax.Device]:
    """Those of a step that this process holds."""
    here = jax.process_index()
    return [d for d in step.bound.mesh.devices.flat if d.process_index == here]


def with_injected_rate(
    step: Step,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The step; where its optimizer keeps the learning rate in its state, the metrics have it."""
    if _RATE not in hyperparameters(step.abstract["opt_state"]):
        return step

    def with_rate(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        state, metrics = step(state, batch)
        # A copy: the next step gives the state up before this is read.
        return state, {_RATE: jnp.copy(hyperparameters(state["opt_state"])[_RATE]), **metrics}

    return with_rate
