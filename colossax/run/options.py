"""How a task is run, where, and how that ended."""

import dataclasses
import numbers
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import jax

from colossax.config import Plan
from colossax.errors import InputError
from colossax.run.records import Record
from colossax.run.trackers import DEFAULT_TRACKERS

Source = str | Path | tuple[str | Path, str]
"""Folder of a run, of checkpoints, or of one step; or `(folder, model)`, one of several there."""

Init = Source | Mapping[str, Source]
"""Where a run's parameters come from, or those of each of its models by name."""


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
        stop_after_skipped: Steps skipped in a row, their loss or gradient norm not finite, after
            which the run ends; 0 goes on all the same.
        init: Checkpoint whose parameters a new run starts from, in place of random ones. Of
            several models, a folder alone is a checkpoint of all of them; by name, each has one of
            its own, `{"policy": "sft", "reference": "sft", "critic": ("earlier", "judge")}`: there
            it is the model of the same name, or the only one, or the one that is named. A model
            that is left out begins random.
    """

    plan: Plan = Plan()
    steps: int
    seed: int = 0
    validate_every: int = 0
    checkpoint_every: int = 0
    keep: int = 2
    stop_after_skipped: int = 10
    init: Init | None = None

    def __post_init__(self):
        least = {"steps": 1, "seed": 0, "validate_every": 0, "checkpoint_every": 0, "keep": 1}
        least["stop_after_skipped"] = 0
        for name, low in least.items():
            value = getattr(self, name)
            if not isinstance(value, numbers.Integral):
                raise InputError(f"{name}: found {value!r}; give a whole number, {low} or more")
            if value < low:
                raise InputError(f"{name}: found {value}; give {low} or more")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where a run happens and who listens; nothing here changes its losses.

    Attributes:
        out: The run's folder; None takes the next number under `runs/`.
        resume: Go on with the run in `out`; `"auto"` starts one where there is none.
        trackers: Where metrics go beside `metrics.jsonl`, by name: `tensorboard`, `wandb` (offline,
            unless its environment says otherwise), `trackio`; `json` adds nothing.
        devices: Gives the devices; called when JAX may be asked.
        emit: Takes one record per step and the final one; None on all processes but the first.
    """

    out: str | None = None
    resume: bool | Literal["auto"] = False
    trackers: Sequence[str] = DEFAULT_TRACKERS
    devices: Callable[[], list[jax.Device]] = jax.devices
    emit: Callable[[Record], None] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended.

    Attributes:
        final: Its numbers.
        stopped_by: `SIGTERM` or `SIGINT` when it was told to stop, else None.
        failure: Why it ended before its last step by itself, in one sentence; else None.
    """

    final: Record
    stopped_by: str | None
    failure: str | None = None
