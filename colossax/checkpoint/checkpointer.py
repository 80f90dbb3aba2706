"""Saving and restoring the state of a run."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from colossax.checkpoint import reading
from colossax.checkpoint.folder import StepFolder, finished_steps
from colossax.checkpoint.manifest import check_document_name
from colossax.checkpoint.slots import ArraySlot, LayerSource
from colossax.checkpoint.writing import ArraysJob
from colossax.errors import CheckpointError


class Checkpointer:
    """The checkpoints of one run, in one directory.

    Every process makes one and calls `save`, `wait` and `close` alike; reading needs no company.
    Nothing on disk is touched before the first `save`, which also clears away what a killed
    process left half-written.

    A save that fails is no end to training: the earlier checkpoints stay, later saves work, and
    the failure is handed out once, by `last_error`, or else raised by `wait` or `close`.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        keep: int | None = 3,
        asynchronous: bool = True,
        timeout_s: float = 1200.0,
        barred: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Name the directory.

        Args:
            directory: Holds one folder per step.
            keep: How many of the latest steps to keep; None keeps all.
            asynchronous: Return from `save` once arrays are copied to the host, and write in
                the background; costs host memory for what this process writes.
            timeout_s: How long a save may take, those of other processes included.
            barred: Asked on process 0 before anything is written, and before a step is made
                whole, why that may not be; None where it may. All processes fail a save with it.
        """
        self._barred = barred
        self.directory = Path(directory)
        self._keep, self._asynchronous, self._timeout_s = keep, asynchronous, timeout_s
        self._committer: Any = None
        self._error: CheckpointError | None = None

    def steps(self) -> list[int]:
        """Finished steps, ascending."""
        return finished_steps(self.directory)

    def latest(self) -> int | None:
        """Latest finished step; None when there is none."""
        return max(self.steps(), default=None)

    def documents(self, step: int | None = None) -> dict[str, Any]:
        """JSON documents of a step, by default the latest.

        Raises:
            CheckpointError: There is no such step, or it is damaged.
        """
        return StepFolder(self.directory, step).documents()

    def save(
        self,
        step: int,
        arrays: Sequence[tuple[ArraySlot, jax.Array | LayerSource]],
        documents: Mapping[str, Any],
    ) -> bool:
        """Save a step, after waiting for the save before it.

        The arrays may be donated once this returns. Where rows are among them it returns when all
        is written.

        Args:
            step: Name of the checkpoint.
            arrays: With their slots, the same on every process and in the same order.
            documents: JSON values by name.

        Returns:
            False when the step is there already, and is left as it is, or when this save or its
            start has failed (see `last_error`).

        Raises:
            ValueError: The arrays do not make up whole records.
        """
        texts = document_texts(documents)
        self._collect()
        if step in self.steps():
            return False
        job = ArraysJob(arrays, copy_now=self._asynchronous)
        try:
            self._open().start(step, job, texts)
        except CheckpointError as error:
            self._error = error
            return False
        if self._asynchronous and not any(isinstance(x, LayerSource) for _, x in arrays):
            return True
        return self._collect()

    def restore(
        self,
        step: int | None,
        wants: Sequence[tuple[ArraySlot, jax.sharding.Sharding]],
        *,
        exact: bool = True,
        convert: bool = False,
        whole: Sequence[str] = (),
    ) -> list[jax.Array]:
        """Arrays of a step, each sharded as asked.

        Each device's region is read from disk by itself: neither a device nor the host ever
        holds more of a sharded array, and the mesh and processes that wrote it do not matter.

        Args:
            step: Which; None is the latest.
            wants: What each array is, and its sharding.
            exact: Refuse a step that holds more records of the kinds that are asked for.
            convert: Allow a slot of floats to differ in dtype from the one on disk.
            whole: Kinds, `<model>/<kind>`, of which `exact` counts records as asked for even where
                no array is: an optimizer without state refuses that of another.

        Raises:
            CheckpointError: There is no such step, it is of another model (names the first
                record that differs), or it is damaged.
        """
        folder = StepFolder(self.directory, step)
        slots = [slot for slot, _ in wants]
        reading.check_same_model(folder, slots, exact=exact, convert=convert, whole=whole)
        return reading.read_arrays(folder, wants)

    def check(self, step: int | None, slots: Sequence[ArraySlot], *, exact: bool) -> None:
        """Refuse what `restore` would of these slots, floats of any dtype; nothing is read.

        Args:
            step: Which; None is the latest.
            slots: What each array is.
            exact: As of `restore`.

        Raises:
            CheckpointError: As `restore`.
        """
        reading.check_same_model(
            StepFolder(self.directory, step), list(slots), exact=exact, convert=True
        )

    def holds_record(self, step: int | None, name: str) -> bool:
        """Whether a step has an array of this name; the latest, if `step` is None.

        Raises:
            CheckpointError: There is no such step.
        """
        return name in StepFolder(self.directory, step).manifest.records

    def last_error(self) -> CheckpointError | None:
        """The failure of a save that has not been handed out yet; does not wait for a save."""
        if self._committer is not None and self._committer.failed:
            self._collect()
        error, self._error = self._error, None
        return error

    def wait(self) -> None:
        """Wait until what was saved is on disk.

        Raises:
            CheckpointError: A save failed, and `last_error` has not handed it out.
        """
        self._collect()
        if (error := self.last_error()) is not None:
            raise error

    def close(self) -> None:
        """Wait and release threads; a later `save` opens again.

        Raises:
            CheckpointError: As `wait`.
        """
        self._release()
        self.wait()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._release()

    def _release(self) -> None:
        self._collect()
        if self._committer is not None:
            self._committer.close()
            self._committer = None

    def _open(self) -> Any:
        """The Orbax side, imported when something is saved."""
        if self._committer is None:
            from colossax.checkpoint.commit import Committer

            self._committer = Committer(
                self.directory, keep=self._keep, timeout_s=self._timeout_s, barred=self._barred
            )
        return self._committer

    def _collect(self) -> bool:
        """Wait for the save under way and keep its failure; False when it failed."""
        if self._committer is None:
            return True
        try:
            self._committer.wait()
        except CheckpointError as error:
            self._error = error
            return False
        return True


def document_texts(documents: Mapping[str, Any]) -> dict[str, bytes]:
    """JSON texts of documents.

    Raises:
        ValueError, TypeError: A name is taken, or a value is not JSON.
    """
    for name in documents:
        check_document_name(name)
    return {name: json.dumps(value).encode() for name, value in documents.items()}
