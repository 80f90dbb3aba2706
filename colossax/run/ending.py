"""Why a run ended without what it promises, in one sentence each."""

import contextlib
import math
from typing import TYPE_CHECKING

from colossax.errors import InputError
from colossax.run.lock import RunLock
from colossax.run.not_finite import first_not_finite
from colossax.run.prepared import Prepared
from colossax.run.records import Record
from colossax.run.run_dir import RunFolder
from colossax.step.gradients.loss_scale import LOSS_SCALE
from colossax.typing import TrainState

if TYPE_CHECKING:
    from colossax.run.run import Loop

LOST = "lock"
"""What stops a run whose folder is no longer its own."""


def not_finite(
    run: Prepared,
    loop: "Loop",
    state: TrainState,
    checkpoint: int | None,
    *,
    steps: int,
    stopped_by: str | None,
) -> str | None:
    """Why a run is no longer finite, and from where it goes on; None where it is.

    It is not after so many skipped steps as end it, nor at its end when all its steps were skipped.
    """
    count = loop.meter.skipped_in_a_row
    if not loop.hopeless and (stopped_by is not None or not 0 < steps <= count):
        return None
    if not loop.meter.not_finite_in_a_row:
        return (
            f"all {steps} steps were skipped, as gradients overflow float16 down to a loss scale of"
            f" {(loop.last or {})[LOSS_SCALE]:g}; {_kept(run, checkpoint)}; give more steps, or a"
            " lower plan.precision.loss_scale.initial"
        )
    first = first_not_finite(run.step, state, loop.last_batch)
    if loop.hopeless:
        step = (loop.last or {}).get("step")
        what = f"stopped at step {step}: the last {count} steps were skipped"
    else:
        what = f"all {steps} steps were skipped"
    good = "" if checkpoint is None else "good "
    return (
        f"{what}, as loss or gradient norm was not finite, first {first};"
        f" {_kept(run, checkpoint, good)}; lower the learning rate, or look at the data"
    )


def why_skipped(record: Record) -> str:
    """What is not finite of a step, by its record."""
    loss, scale = record["loss"], record.get(LOSS_SCALE)
    if scale is None or not math.isfinite(loss):
        return "its loss or gradient norm is not finite"
    return f"its gradients overflow float16 at a loss scale of {scale:g}"


def lost(lock: RunLock, done: int, stopped_by: str | None) -> str | None:
    """That the folder is no longer the run's; None where it is."""
    if (why := lock.check()) is None and stopped_by != LOST:
        return None
    why = why or "process 0 may no longer write into the run's folder"
    return f"stopped after step {done}: {why}; nothing more was written there"


def clear_old_place(folder: RunFolder) -> None:
    """Remove what a save that was under way wrote where a folder had been that was moved.

    Files are written by their paths, whose folders are made anew. A folder that holds more than
    unfinished steps, or that another run has, is left alone.
    """
    left = [path.name for path in folder.path.iterdir()] if folder.path.is_dir() else []
    if left != [folder.checkpoints.name]:
        return
    from colossax.checkpoint.commit import remove_unfinished  # Orbax, which what saved has loaded

    with contextlib.suppress(InputError, OSError):
        lock = RunLock(folder.path)
        lock.take()
        try:
            remove_unfinished(folder.checkpoints)
            folder.checkpoints.rmdir()
        finally:
            lock.release()
        folder.path.rmdir()


def unsaved(run: Prepared, done: int, checkpoint: int | None, stopped_by: str | None) -> str:
    """That the last state is not on disk, and what is."""
    stopped = "" if stopped_by is None else f"stopped by {stopped_by}; "
    return (
        f"{stopped}the state after step {done} is not on disk, as it could not be saved;"
        f" {_kept(run, checkpoint)}; make room and go on with --resume"
    )


def _kept(run: Prepared, checkpoint: int | None, good: str = "") -> str:
    if checkpoint is None:
        return "no checkpoint was saved before"
    return f"the last {good}checkpoint is that of step {checkpoint}, in {run.folder.checkpoints}"
