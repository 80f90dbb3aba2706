"""The checkpoints of a run: a whole state each, and where its data goes on."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Sharding

from colossax.checkpoint import ArraySlot, Checkpointer
from colossax.checkpoint.base import BASE
from colossax.checkpoint.broken import broken_steps, move_aside
from colossax.errors import CheckpointError
from colossax.run.run_dir import first_difference
from colossax.step.saving.records import StateRecords
from colossax.step.step import Step
from colossax.typing import Params, TrainState


def _position(done: int) -> dict[str, int]:
    """Where the data goes on after `done` steps: batch g is rows g * global_batch and following."""
    return {"batch": done}


def _identity(documents: dict[str, Any]) -> dict[str, Any]:
    """Which run documents are of; empty where they do not say."""
    run = documents.get("run")
    identity = run.get("identity") if isinstance(run, dict) else None
    return identity if isinstance(identity, dict) else {}


Beside = Callable[[], tuple[dict[str, Any], list[tuple[ArraySlot, jax.Array]]]]
"""Documents and arrays that a checkpoint holds beside the state."""


class RunCheckpoints:
    """The checkpoints of a run: a whole state each, and what is needed to go on or to serve it."""

    def __init__(
        self,
        folder: Path,
        step: Step,
        *,
        keep: int,
        documents: dict[str, Any],
        report: Callable[[str], None],
        beside: Beside = lambda: ({}, []),
        barred: Callable[[], str | None] = lambda: None,
    ):
        """Name the folder; nothing is written yet.

        Args:
            folder: Of the checkpoints.
            step: Whose states they are.
            keep: How many to keep.
            documents: JSON values stored with each, beside the data position.
            report: Told in one sentence of a checkpoint that could not be written.
            beside: Asked at each save for more that belongs to it.
            barred: See `Checkpointer`.
        """
        self._records = StateRecords(step)
        self._documents = documents
        self._report = report
        self._beside = beside
        # A copy of what host memory holds, to go on beside the writing, is room that nobody has.
        asynchronous = not self._records.on_host
        self._checkpointer = Checkpointer(
            folder, keep=keep, asynchronous=asynchronous, barred=barred
        )

    def save(self, state: TrainState, done: int) -> None:
        """Start saving the state after `done` steps; it may be donated when this returns.

        It is written when this returns where any of the state lives in host memory or on disk, and
        while training goes on elsewhere. A failure to write, of this save or of an earlier one, is
        reported, and training goes on.

        Raises:
            OffloadError: The optimizer's state cannot be read from disk.
        """
        more, arrays = self._beside()
        documents = {**self._documents, **more, "position": _position(done)}
        self._checkpointer.save(done, [*self._records.pairs(state), *arrays], documents)
        self._tell()

    def latest(self) -> int | None:
        """Steps done at the latest checkpoint."""
        return self._checkpointer.latest()

    def restore(self, done: int, base: Params | None = None) -> TrainState:
        """The state after `done` steps, laid out by the step's plan.

        Args:
            done: Which.
            base: See `StateRecords.restored`.

        Raises:
            CheckpointError: It is damaged, of another run, model or optimizer, or holds a data
                position that is not that of this step.
        """
        documents = self._checkpointer.documents(done)
        self._check_run(done, documents)
        self._check_position(done, documents)
        self._check_base(done, documents)
        return self._records.restored(self._checkpointer, done, base)

    def set_broken_aside(self) -> None:
        """Move steps aside that are no longer whole, and report each; by one process alone."""
        for done, lack in broken_steps(self._checkpointer.directory).items():
            self.set_aside(done, lack)

    def set_aside(self, done: int, reason: str) -> None:
        """Move the checkpoint after `done` steps out of the way, and report it.

        Raises:
            CheckpointError: It cannot be moved.
        """
        directory = self._checkpointer.directory
        try:
            target = move_aside(directory, done)
        except OSError as problem:
            raise CheckpointError(
                f"checkpoint '{directory}' step {done} is broken ({reason}) and cannot be moved"
                f" aside ({problem.strerror}); move it away, or make the folder writable"
            ) from problem
        self._report(f"checkpoint of step {done} is broken ({reason}); it was moved to '{target}'")

    def before(self, done: int) -> int | None:
        """Steps done at the latest checkpoint before; None where there is none."""
        return max((step for step in self._checkpointer.steps() if step < done), default=None)

    def holds(self, done: int) -> bool:
        """Whether there is one after `done` steps."""
        return done in self._checkpointer.steps()

    def document(self, done: int, name: str) -> Any:
        """A JSON value of the checkpoint after `done` steps; None where it has none."""
        return self._checkpointer.documents(done).get(name)

    def arrays(self, done: int, wants: Sequence[tuple[ArraySlot, Sharding]]) -> list[jax.Array]:
        """Arrays that it has beside the state, see `beside`, each sharded as asked."""
        return self._checkpointer.restore(done, wants, exact=False)

    def _check_run(self, done: int, documents: dict[str, Any]) -> None:
        """Refuse the checkpoint of another run, whoever put it there."""
        asked, stored = _identity(self._documents), _identity(documents)
        if (difference := first_difference(stored, asked)) is not None:
            field, there, here = difference
            raise CheckpointError(
                f"checkpoint '{self._checkpointer.directory}' step {done} is of another run:"
                f" {field} is {there} there and {here} here; resume that run in a folder of its"
                " own, or start a new one"
            )

    def _check_base(self, done: int, documents: dict[str, Any]) -> None:
        """Refuse to go on beside another base than the adapter was trained beside."""
        here, there = self._documents.get(BASE), documents.get(BASE)
        if here is None or not isinstance(there, dict):
            return
        if here["checksum"] != there.get("checksum"):
            raise CheckpointError(
                f"checkpoint '{self._checkpointer.directory}' step {done} is an adapter of another"
                f" base than '{here['path']}', whose parameters differ; put back the one that it"
                f" was trained beside, {there.get('path')!r}"
            )

    def _check_position(self, done: int, documents: dict[str, Any]) -> None:
        """Refuse to go on with other data than the run would have seen next."""
        position = documents.get("position")
        if position != _position(done):
            raise CheckpointError(
                f"checkpoint '{self._checkpointer.directory}' step {done}: found the data position"
                f" {position}, and after {done} steps it is {_position(done)}; resume from another"
                " checkpoint, by deleting this one"
            )

    def finish(self) -> None:
        """Wait until everything is on disk, or reported not to be."""
        try:
            self._checkpointer.close()
        except CheckpointError as problem:
            self._report(str(problem))

    def _tell(self) -> None:
        problem = self._checkpointer.last_error()
        if problem is not None:
            self._report(f"{problem}; training goes on")
