"""What a run has around its loop."""

from collections.abc import Callable, Mapping
from pathlib import Path

from colossax.errors import InputError
from colossax.run.calling import Callbacks, Tools
from colossax.run.checkpointing import Beside, RunCheckpoints
from colossax.run.lock import LOCK_FILE, RunLock
from colossax.run.prepared import OFFLOADED, Prepared
from colossax.run.progress import Screen
from colossax.run.records import Record, Records, finite
from colossax.run.run_dir import LOG_FILE, RUN_FILE, RunFolder
from colossax.run.trackers import EVENTS_FOLDER, About
from colossax.run.unfinished import Unfinished
from colossax.typing import TrainState

_HERE = RunFolder(path=Path())
_TAKEN = {
    *(
        path.name
        for path in (_HERE.checkpoints, _HERE.metrics, _HERE.picture, _HERE.experts_picture)
    ),
    *(RUN_FILE, LOCK_FILE, LOG_FILE, EVENTS_FOLDER, "wandb", OFFLOADED),
}


STEP_FIELDS = ("step", "loss", "grad_norm", "tokens", "tokens_per_s")
"""What is emitted of each step."""


def check_apart(folder: str) -> None:
    """Refuse a folder for a callback's checkpoints that is none of its own in the run's.

    Raises:
        InputError: It is a path, or a name that the run itself uses.
    """
    if folder.casefold() in _TAKEN or folder in ("", ".", "..") or set(folder) & {"/", "\\", "\0"}:
        raise InputError(
            f"callback: saves into folder {folder!r}; give a plain name, as 'best', that is none of"
            f" {', '.join(sorted(_TAKEN))}"
        )


class Around:
    """What a run has around its loop: its checkpoints, its callbacks, where records go."""

    def __init__(self, run: Prepared, screen: Screen, lock: RunLock):
        """Name folders; nothing is written yet."""
        self._run, self._screen, self._lock = run, screen, lock
        self._apart: dict[str, RunCheckpoints] = {}
        self.record: Callable[[Record], None] = lambda record: None
        tools = Tools(
            evaluate=self.evaluate,
            record=lambda record: self.record(record),
            note=screen.note,
            save=self._save_apart,
        )
        self.callbacks = Callbacks(run.task.callbacks, run.step, run.config.steps, tools)
        self.checkpoints = self._checkpoints(
            run.folder.checkpoints, run.config.keep, self.callbacks.kept
        )

    def evaluate(self, state: TrainState) -> Mapping[str, float]:
        """The metrics of all evaluators."""
        return self._run.task.evaluated(self._run.step, state)

    def keep(self, state: TrainState, done: int) -> None:
        """Save a state and wait for it, unless other processes would have to save it too."""
        if self._run.group.processes == 1:
            self.checkpoints.save(state, done)
            self.finish()

    def finish(self) -> None:
        """Wait until everything is on disk, or reported not to be."""
        for checkpoints in (self.checkpoints, *self._apart.values()):
            checkpoints.finish()

    def _save_apart(self, state: TrainState, done: int, folder: str) -> None:
        check_apart(folder)
        if folder not in self._apart:
            self._apart[folder] = self._checkpoints(self._run.folder.path / folder, 1)
        self._apart[folder].save(state, done)

    def _checkpoints(
        self, folder: Path, keep: int, beside: Beside = lambda: ({}, [])
    ) -> RunCheckpoints:
        return RunCheckpoints(
            folder,
            self._run.step,
            keep=keep,
            documents=self._run.documents,
            report=self._screen.note,
            beside=beside,
            barred=self._lock.check,
        )


def recorder(
    files: Records, emit: Callable[[Record], None], lock: RunLock
) -> Callable[[Record], None]:
    """Where records go: files, as long as the folder is the run's, and whoever listens."""

    def record(record: Record) -> None:
        if lock.lost is None:
            files.write(record)
        if "loss" in record:
            emit(finite({name: record[name] for name in STEP_FIELDS}))

    return record


def emitter(run: Prepared, screen: Screen) -> Callable[[Record], None]:
    """Hands records to whoever listens, until that one is gone, which is told once."""
    listener = run.options.emit

    def emit(record: Record) -> None:
        nonlocal listener
        if listener is None:
            return
        try:
            listener(record)
        except OSError as problem:
            listener = None
            screen.note(f"records are no longer emitted ({problem.strerror}); training goes on")

    return emit


def records_of(
    run: Prepared, start: int, left: Unfinished | None, screen: Screen
) -> Records | None:
    """The files of a run, with `run.json` once all trackers are open; on the first process alone.

    Raises:
        InputError: A tracker does not begin, or the folder cannot be written.
    """
    if not run.group.first:
        return None
    run.folder.make()
    about = About(
        folder=run.folder.path,
        name=run.task.name,
        config=run.asked,
        from_step=start,
        begun=run.begun,
    )
    return Records(
        about,
        report=screen.note,
        trackers=run.options.trackers,
        opened=lambda: run.folder.write(run.asked, run.identity),
        coming=() if left is None else left.metrics.keys(),
    )
