"""How a task is run, where, and how that ended."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import jax

from colossax.run.records import Record
from colossax.run.trackers import DEFAULT_TRACKERS
from colossax.tasks import RunLength

Source = str | Path | tuple[str | Path, str]
"""Folder of a run, of checkpoints, or of one step; or `(folder, model)`, one of several there."""

Init = Source | Mapping[str, Source]
"""Where a run's parameters come from, or those of each of its models by name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(RunLength):
    """How a task is run; what its plan leaves to `auto` is settled first.

    Attributes:
        init: Checkpoint whose parameters a new run starts from, in place of random ones. Of
            several models, a folder alone is a checkpoint of all of them; by name, each has one of
            its own, `{"policy": "sft", "reference": "sft", "critic": ("earlier", "judge")}`: there
            it is the model of the same name, or the only one, or the one that is named. A model
            that is left out begins random.
    """

    init: Init | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where a run happens and who listens; nothing here changes its losses.

    Attributes:
        out: The run's folder; None takes the next number under `runs/`.
        resume: Go on with the run in `out`; `"auto"` starts one where there is none.
        trackers: Where metrics go beside `metrics.jsonl`, by name: `tensorboard`, `wandb` (offline,
            unless its environment says otherwise), `trackio`; `json` adds nothing.
        base: Where `RunConfig.init` is of an adapter: where the checkpoint that it was trained
            beside is now; None: where it was.
        take_over: Also write into a folder that another run writes into, which then stops.
        devices: Gives the devices; called when JAX may be asked.
        emit: Takes one record per step and the final one; None on all processes but the first.
    """

    out: str | None = None
    resume: bool | Literal["auto"] = False
    trackers: Sequence[str] = DEFAULT_TRACKERS
    base: str | Path | None = None
    take_over: bool = False
    devices: Callable[[], list[jax.Device]] = jax.devices
    emit: Callable[[Record], None] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended.

    Attributes:
        final: Its numbers.
        stopped_by: `SIGTERM`, `SIGINT` or `SIGHUP` when it was told to stop, `lock` when its folder
            became another run's or went away, else None.
        failure: Why it ended before its last step by itself, or without its last checkpoint on
            disk, in one sentence; else None.
    """

    final: Record
    stopped_by: str | None
    failure: str | None = None
