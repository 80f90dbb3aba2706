"""The Orbax side of saving: folders that appear when all processes are done, keep-N, threads.

Imported when something is saved, never to read.

Orbax waits at barriers for all processes while a step is committed, and a process that fails
leaves the others waiting for its time limit. So processes first agree, by files that each leaves
when it is done, and then all fail or none.
"""

import concurrent.futures
import dataclasses
import itertools
import json
import logging
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from colossax.checkpoint import store
from colossax.checkpoint.broken import broken_steps, move_aside
from colossax.checkpoint.folder import (
    ARRAYS_ITEM,
    DOCUMENT_FILE,
    MANIFEST,
    RECORD_FILE,
    TREE_FILE,
    UNFINISHED,
)
from colossax.checkpoint.manifest import Manifest
from colossax.checkpoint.seals import grid_of, header_of, number_in, seal
from colossax.checkpoint.slots import record_folder
from colossax.checkpoint.writing import Job
from colossax.errors import CheckpointError, CheckpointWarning

Barred = Callable[[], str | None]

_attempts = itertools.count()

_PROBE = ".writable-"

_FAILURES = (CheckpointError, OSError, jax.errors.JaxRuntimeError)
"""What a save may fail with that is no mistake of ours."""

_MOST_FAILURES = 8
"""How many failures of one save Orbax may raise one after the other: one per thread and file."""


class _OwnFailures(logging.Filter):
    """Drops the tracebacks Orbax logs of failures that we report ourselves."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        # Absl itself is named where its logger is older than its own class of loggers.
        here = any(name in record.pathname for name in ("orbax", "absl"))
        return not (isinstance(error, _FAILURES) and here)


logging.getLogger("absl").addFilter(_OwnFailures())


@dataclasses.dataclass(kw_only=True)
class Attempt:
    """One save of one step.

    Attributes:
        step: Which.
        job: Writes the records.
        documents: JSON texts by name, written by process 0.
        timeout_s: How long processes wait for one another.
        error: What this process could not do.
        barred: Says why a step may not be made whole; None where it may.
        failed: Whether all processes have agreed that the save failed.
        seals: Of the files that this process wrote, by record and number.
    """

    step: int
    job: Job
    documents: Mapping[str, bytes]
    timeout_s: float
    barred: Barred
    error: Exception | None = None
    failed: bool = False
    seals: dict[str, dict[int, int]] = dataclasses.field(default_factory=dict)
    number: int = dataclasses.field(default_factory=lambda: next(_attempts))

    def meet(self, where: str) -> None:
        """Wait until all processes are here."""
        meet(f"colossax_save_{self.number}_{where}", self.timeout_s)

    def args(self) -> Any:
        """What Orbax is asked to save."""
        items: dict[str, Any] = {
            name: DocumentArgs(name=name, attempt=self) for name in self.documents
        }
        return ocp.args.Composite(**items, **{ARRAYS_ITEM: RecordArgs(attempt=self)})

    def write(self, folder: Path) -> None:
        """Write this process's part, and seal it."""
        self.job.write(folder)
        for name, places in self.job.places().items():
            spec = self.job.records[name]
            assert spec.layout is not None
            header = header_of(self.step, name, spec.dtype, spec.layout)
            grid, at = grid_of(spec.shape, spec.layout.file), folder / record_folder(name)
            self.seals[name] = {
                number_in(grid, place): seal(header, at, place, spec.layout, spec.dtype)
                for place in places
            }

    def settle(self, folder: Path) -> None:
        """Make the step complete if all processes wrote their part.

        Raises:
            CheckpointError: One could not; all processes raise.
        """
        if self.error is None:
            self.error = _try(self._sign, folder)
        self.meet("written")
        if jax.process_index() == 0 and self.error is None:
            self.error = _try(self._complete, folder)
        self.meet("judged")
        if self.error is None and not (folder / MANIFEST).is_file():
            self.error = CheckpointError("another process could not write its part")
        if self.error is not None:
            self.failed = True
            raise CheckpointError(store.reason(self.error)) from self.error

    def _sign(self, folder: Path) -> None:
        content = json.dumps(self.seals).encode()
        store.write_durably(_signature(folder, jax.process_index()), content)

    def _complete(self, folder: Path) -> None:
        if (reason := self.barred()) is not None:
            raise CheckpointError(reason)
        signatures = [_signature(folder, process) for process in range(jax.process_count())]
        seals: dict[str, dict[int, int]] = {name: {} for name in self.job.records}
        for process, signature in enumerate(signatures):
            if not signature.exists():
                raise CheckpointError(f"process {process} could not write its part")
            for name, part in json.loads(signature.read_bytes()).items():
                seals[name].update({int(number): seal for number, seal in part.items()})
            signature.unlink()
        for name, spec in self.job.records.items():
            if len(seals[name]) != spec.files:
                raise CheckpointError(f"files of record '{name}' were not written")
        manifest = Manifest(
            records=self.job.records,
            documents={name: zlib.crc32(text) for name, text in self.documents.items()},
            step=self.step,
            seals={name: [part[i] for i in range(len(part))] for name, part in seals.items()},
            metadata=_metadata_checksums(folder, self.job.records),
        )
        store.write_durably(folder / MANIFEST, manifest.to_json())


def _metadata_checksums(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """CRC-32 of the small files beside the values, by path below the item."""
    records = [record_folder(name) for name in names]
    trees = dict.fromkeys(f"{Path(record).parent}/{TREE_FILE}" for record in records)
    paths = (*(f"{record}/{RECORD_FILE}" for record in records), *trees)
    return {path: zlib.crc32((folder / path).read_bytes()) for path in paths}


def _signature(folder: Path, process: int) -> Path:
    return folder / f"written-by-{process}"


def _try(action: Any, folder: Path) -> Exception | None:
    try:
        action(folder)
    except (OSError, ValueError) as error:
        return error
    return None


def meet(key: str, timeout_s: float) -> None:
    """Barrier over all processes, by messages, so that it may run beside training."""
    ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=int(timeout_s * 1000))


class _Outcome:
    """Future of one attempt: writes in a thread, then settles with the other processes."""

    def __init__(self, attempt: Attempt, folder: Path) -> None:
        self._attempt, self._folder = attempt, folder
        executor = concurrent.futures.ThreadPoolExecutor(1, "colossax_checkpoint")
        self._written = executor.submit(_try, attempt.write, folder)
        executor.shutdown(wait=False)

    def result(self, timeout: float | None = None) -> None:
        error = self._written.result(timeout)
        self._attempt.error = self._attempt.error or error
        self._attempt.settle(self._folder)

    def cancel(self) -> bool:
        return False


class RecordHandler(ocp.AsyncCheckpointHandler):
    """Lets Orbax save records; they are read without it."""

    async def async_save(self, directory: Any, args: "RecordArgs") -> list[Any]:
        return [_Outcome(args.attempt, Path(directory))]

    def save(self, directory: Any, args: "RecordArgs") -> None:
        _Outcome(args.attempt, Path(directory)).result()

    def restore(self, directory: Any, args: Any = None) -> Any:
        raise NotImplementedError("records are read by colossax.checkpoint.RecordReader")


@ocp.args.register_with_handler(RecordHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class RecordArgs(ocp.args.CheckpointArgs):
    """All records of a step."""

    attempt: Attempt


class DocumentHandler(ocp.AsyncCheckpointHandler):
    """Lets Orbax save a JSON text; Orbax's own JSON handler reads it too."""

    async def async_save(self, directory: Any, args: "DocumentArgs") -> list[Any]:
        self.save(directory, args)
        return []

    def save(self, directory: Any, args: "DocumentArgs") -> None:
        """Write on process 0; a failure becomes the attempt's, for all to hear of."""
        if jax.process_index():
            return
        attempt, path = args.attempt, Path(directory) / DOCUMENT_FILE
        try:
            store.write_durably(path, attempt.documents[args.name])
        except OSError as error:
            attempt.error = error

    def restore(self, directory: Any, args: Any = None) -> Any:
        raise NotImplementedError("documents are read by colossax.checkpoint.RecordReader")


@ocp.args.register_with_handler(DocumentHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class DocumentArgs(ocp.args.CheckpointArgs):
    """One document of a step."""

    name: str
    attempt: Attempt


class Committer:
    """Commits steps to one directory, one at a time, and keeps the latest."""

    def __init__(
        self, directory: Path, *, keep: int | None, timeout_s: float, barred: Barred = lambda: None
    ) -> None:
        """Open a directory for writing, creating it; clears away what killed processes left.

        Raises:
            CheckpointError: It cannot be written; raised on every process.
        """
        self._directory, self._timeout_s, self._barred = directory, timeout_s, barred
        self._attempt: Attempt | None = None
        try:
            self._probe()
        except _FAILURES as error:
            raise self._refusal("a checkpoint", error) from error
        if jax.process_index() == 0:
            remove_unfinished(directory)
            free_numbers(directory)
        self._keep = keep
        self._manager = self._open_manager()

    def _open_manager(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self._keep,
            create=False,
            save_root_metadata=False,
            lightweight_initialize=True,
            async_options=ocp.options.AsyncOptions(
                timeout_secs=int(self._timeout_s), create_directories_asynchronously=False
            ),
        )
        return ocp.CheckpointManager(self._directory.absolute(), options=options)

    @property
    def failed(self) -> bool:
        """Whether the save under way is known to have failed."""
        return self._attempt is not None and self._attempt.failed

    def start(self, step: int, job: Job, documents: Mapping[str, bytes]) -> None:
        """Start saving a step; the one before it must have been waited for.

        Raises:
            CheckpointError: It could not be started.
        """
        how: Any = {"timeout_s": self._timeout_s, "barred": self._barred}
        attempt = Attempt(step=step, job=job, documents=documents, **how)
        try:
            self._probe()
            self._manager.save(step, args=attempt.args(), force=True)
        except _FAILURES as error:
            raise self._discard(step, error) from error
        self._attempt = attempt

    def wait(self) -> None:
        """Wait for the save under way.

        Raises:
            CheckpointError: It failed; nothing is left of it.
        """
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return
        try:
            self._manager.wait_until_finished()
        except _FAILURES as error:
            raise self._discard(attempt.step, error) from error

    def close(self) -> None:
        """Release threads, after `wait`."""
        for _ in range(_MOST_FAILURES):
            try:
                self._manager.close()
            except _FAILURES:
                continue  # of a save that `wait` has reported; each is raised once
            return

    def _discard(self, step: int, error: Exception) -> CheckpointError:
        """Remove what a failed save left, on disk and in Orbax.

        Orbax may have further failures of that save in store, to raise at the next; and it
        believes that it has deleted the steps which this save would have replaced.
        """
        self.close()
        if jax.process_index() == 0 and self._barred() is None:
            shutil.rmtree(self._directory / f"{step}{UNFINISHED}", ignore_errors=True)
        self._manager = self._open_manager()
        return self._refusal(f"step {step}", error)

    def _refusal(self, what: str, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{what} could not be saved in checkpoint directory '{self._directory}' "
            f"({store.reason(error)}); make room or choose another directory"
        )

    def _probe(self) -> None:
        """Create the directory and try that it can be written, with one answer for all.

        Raises:
            CheckpointError, OSError: It cannot.
        """
        number = next(_attempts)
        probe, error = self._directory / f"{_PROBE}{number}", None
        if jax.process_index() == 0:
            reason = self._barred()
            error = _try(_touch, probe) if reason is None else CheckpointError(reason)
        meet(f"colossax_probe_{number}_made", self._timeout_s)
        if jax.process_index() and not probe.exists():
            error = CheckpointError("process 0 cannot write there")
        meet(f"colossax_probe_{number}_seen", self._timeout_s)
        if error is not None:
            raise error
        if jax.process_index() == 0:
            probe.unlink()


def _touch(probe: Path) -> None:
    probe.parent.mkdir(parents=True, exist_ok=True)
    try:
        store.write_durably(probe, b"colossax\n")
    except OSError:
        probe.unlink(missing_ok=True)
        raise


def free_numbers(directory: Path) -> None:
    """Move broken steps aside, which Orbax takes for saved ones, and warn of each."""
    for step, lack in broken_steps(directory).items():
        target = move_aside(directory, step)
        warnings.warn(
            f"checkpoint directory '{directory}': step {step} is broken ({lack}); it was moved to"
            f" '{target.name}'",
            CheckpointWarning,
            stacklevel=2,
        )


def remove_unfinished(directory: Path) -> None:
    """Delete what killed saves and imports left; only while nothing is being saved there."""
    for entry in list(directory.iterdir()):
        if UNFINISHED in entry.name:
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name.startswith(_PROBE):
            entry.unlink(missing_ok=True)
