"""Checkpoints without devices: what importers write and exporters read, one tensor at a time."""

import functools
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from colossax.checkpoint import store
from colossax.checkpoint.broken import chosen
from colossax.checkpoint.checkpointer import document_texts
from colossax.checkpoint.folder import (
    ARRAYS_ITEM,
    MANIFEST,
    UNFINISHED,
    StepFolder,
    finished_steps,
    is_step,
)
from colossax.checkpoint.layout import Layout, choose_layout, files_within
from colossax.checkpoint.manifest import RecordSpec, describe
from colossax.checkpoint.slots import Box, box_slices, record_folder
from colossax.checkpoint.writing import MoveJob
from colossax.documents import as_kind
from colossax.errors import CheckpointError

WRITE_BYTES = 64 << 20
"""Bytes being written at once."""


class RecordReader:
    """One finished step of a checkpoint, read on the host.

    Attributes:
        directory: Of the checkpoints.
        step: Which.
    """

    def __init__(self, path: Path | str, step: int | None = None) -> None:
        """Open a checkpoint directory, or one step's folder.

        Args:
            path: The directory.
            step: Which step of it; None is the latest.

        Raises:
            CheckpointError: There is no finished step, or it is damaged.
        """
        path = Path(path)
        if step is None and is_step(path.name) and (path / ARRAYS_ITEM / MANIFEST).is_file():
            path, step = path.parent, int(path.name)
        self._folder = StepFolder(path, step)
        self.directory, self.step = path, self._folder.step

    @property
    def chosen(self) -> str:
        """Which step this is, for people, and which later ones are broken."""
        return chosen(self.directory, self.step)

    def records(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Shape and dtype of each record."""
        specs = self._folder.manifest.records
        return {name: (spec.shape, spec.dtype) for name, spec in specs.items()}

    def seals(self, prefix: str) -> list[str] | None:
        """Of each record whose name begins so, a line that says what it holds; nothing is read.

        None: the step is of a version that has no seals.
        """
        manifest = self._folder.manifest
        if not manifest.seals:
            return None
        return [
            f"{name} {spec.shape} {spec.dtype.name} {list(manifest.seals.get(name, ()))}"
            for name, spec in manifest.records.items()
            if name.startswith(prefix)
        ]

    def layered(self, name: str) -> bool:
        """Whether dim 0 of a record counts the layers of a stack."""
        return self._spec(name).layered

    def documents(self) -> dict[str, Any]:
        """All JSON documents by name."""
        return self._folder.documents()

    def document(self, name: str, kind: type) -> Any:
        """A JSON document that is of a kind (`dict`, `list`, `str`); None where there is none.

        Raises:
            CheckpointError: It is damaged, or of another kind.
        """
        documents = self.documents()
        if name not in documents:
            return None
        try:
            return as_kind(documents[name], kind, f"document '{name}'")
        except ValueError as error:
            raise CheckpointError(
                f"{self._folder} was not written by this library: {error}; use another step, or"
                " restore it from a copy"
            ) from error

    def experts(self, name: str) -> int | None:
        """How many experts a record holds, each readable alone; None where it holds none.

        Also where the step was written before experts lay in blocks of their own.
        """
        spec = self._spec(name)
        return None if spec.experts is None else spec.shape[spec.experts]

    def read(self, name: str, layer: int | None = None, expert: int | None = None) -> np.ndarray:
        """A record, or one layer of it, or one expert of that, without the dims of these.

        Args:
            name: Of the record.
            layer: Counted from the stack's first; None: all.
            expert: Likewise.

        Raises:
            CheckpointError: There is no such record, or it is damaged.
            ValueError: It has no such layer or expert.

        Cost: of the files that it lies in, its own blocks; beside them of each file's blocks the
        checksum and the place, 20 bytes.
        """
        spec = self._spec(name)
        box = [(0, size) for size in spec.shape]
        without: list[int] = []
        for what, number, dim in (
            ("layer", layer, 0 if spec.layered else None),
            ("expert", expert, spec.experts),
        ):
            if number is None:
                continue
            if dim is None or not 0 <= number < spec.shape[dim]:
                raise ValueError(f"record '{name}' {list(spec.shape)} has no {what} {number}")
            box[dim] = (number, number + 1)
            without.append(dim)
        return self._read_box(name, tuple(box)).squeeze(tuple(without))

    def read_region(self, name: str, region: tuple[slice, ...]) -> np.ndarray:
        """A region of a record, one slice with step 1 per dim.

        Raises:
            CheckpointError: There is no such record, or it is damaged.
        """
        shape = self._spec(name).shape
        box = tuple(part.indices(size)[:2] for part, size in zip(region, shape, strict=True))
        return self._read_box(name, box)

    def _read_box(self, name: str, box: Box) -> np.ndarray:
        handle = self._folder.open_record(name)
        self._folder.check_files(name, box)
        try:
            return store.start_read(handle, box).result()
        except (OSError, ValueError) as error:
            raise self._folder.damaged(f"record '{name}'", error) from error

    def _spec(self, name: str) -> RecordSpec:
        spec = self._folder.manifest.records.get(name)
        if spec is None:
            raise CheckpointError(
                f"{self._folder} has no record '{name}'; it is of another model or kind"
            )
        return spec


def find_checkpoint(path: Path | str, step: int | None = None) -> RecordReader:
    """The checkpoint in a folder.

    Args:
        path: Folder of a run, of checkpoints, or of one step.
        step: Which of its checkpoints; None is the latest.

    Raises:
        CheckpointError: There is no such finished step, or it is damaged.
    """
    directory = Path(path)
    inside = directory / "checkpoints"
    return RecordReader(inside if inside.is_dir() else directory, step)


class RecordWriter:
    """Writes step 0 of a new checkpoint, tensor by tensor, and commits it at the end.

    Holds no more than one tensor and `WRITE_BYTES` of it being encoded. As a context manager it
    removes what it wrote when it was not finished.
    """

    def __init__(self, directory: Path | str, *, timeout_s: float = 1200.0) -> None:
        """Open a directory that holds no checkpoint yet.

        Args:
            directory: Created where it is missing.
            timeout_s: Longest that the commit may take.

        Raises:
            CheckpointError: It holds one, or cannot be written.
        """
        from colossax.checkpoint import commit

        self.directory = Path(directory)
        if steps := finished_steps(self.directory):
            raise CheckpointError(
                f"checkpoint directory '{self.directory}' already holds step {steps[-1]}; choose "
                "another directory"
            )
        self._committer = commit.Committer(self.directory, keep=None, timeout_s=timeout_s)
        self._staging = self.directory / f"import-{os.getpid()}{UNFINISHED}"
        self._records: dict[str, RecordSpec] = {}
        self._missing: dict[str, set[int | None]] = {}
        try:
            self._staging.mkdir(parents=True)
        except OSError as error:
            raise self._failed(error) from error

    def declare(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: np.dtype,
        *,
        layered: bool = False,
        experts: int | None = None,
    ) -> None:
        """Announce a record.

        Args:
            name: `"<model>/<kind>/<path>"`.
            shape: Of the whole record, its layers included.
            dtype: On disk.
            layered: Whether dim 0 counts layers, which are then written one by one.
            experts: Dim that counts experts.
        """
        if name in self._records:
            raise ValueError(f"record '{name}' is declared twice")
        unsharded = {tuple((0, size) for size in shape): frozenset((0,))}
        layout = choose_layout(shape, dtype, layered, [unsharded], experts=experts)
        self._records[name] = RecordSpec(
            shape=shape, dtype=dtype, layered=layered, experts=experts, layout=layout
        )
        self._missing[name] = set(range(shape[0])) if layered else {None}
        self._open(name, create=True)

    def write(self, name: str, array: np.ndarray, layer: int | None = None) -> None:
        """Write a record, or one layer of it, and wait until it is on disk.

        Raises:
            ValueError: It is not what was declared, or was written already.
            CheckpointError: It cannot be written.
        """
        spec = self._records[name]
        shape = spec.shape[1:] if spec.layered else spec.shape
        if (array.shape, array.dtype) != (shape, spec.dtype):
            raise ValueError(
                f"record '{name}' was declared {describe(spec)}, given "
                f"{array.dtype.name}{list(array.shape)} to write"
            )
        if layer not in self._missing[name]:
            raise ValueError(f"record '{name}' has no layer {layer} left to write")
        box = tuple((0, size) for size in shape)
        data = array
        if layer is not None:
            box, data = ((layer, layer + 1), *box), array[None]
        self._write_files(name, box, data)
        self._missing[name].remove(layer)

    def _write_files(self, name: str, box: Box, data: np.ndarray) -> None:
        handle = self._open(name, create=False)
        flight = store.InFlight(WRITE_BYTES)
        try:
            for part in files_within(box, self._layout(name).file):
                content = data if part == box else data[box_slices(part, box)]
                start = functools.partial(store.start_write, handle, part, content)
                flight.add(content.nbytes, start)
            flight.finish()
        except (OSError, ValueError) as error:
            raise self._failed(error) from error
        finally:
            flight.abandon()

    def _open(self, name: str, *, create: bool) -> Any:
        spec, folder = self._records[name], self._staging / record_folder(name)
        try:
            return store.open_for_writing(
                folder, spec.shape, spec.dtype, self._layout(name), create=create
            )
        except (OSError, ValueError) as error:
            raise self._failed(error) from error

    def _layout(self, name: str) -> Layout:
        layout = self._records[name].layout
        assert layout is not None
        return layout

    def finish(self, documents: Mapping[str, Any]) -> None:
        """Commit everything as step 0.

        Raises:
            CheckpointError: A declared record was not written, or the commit failed.
        """
        for name, layers in self._missing.items():
            if layers:
                numbers = sorted(layer for layer in layers if layer is not None)
                what = f"layers {numbers} of record '{name}'" if numbers else f"record '{name}'"
                raise CheckpointError(
                    f"checkpoint directory '{self.directory}' cannot be finished: {what} not "
                    "written; the source lacks it"
                )
        job = MoveJob(self._staging, self._records)
        self._committer.start(0, job, document_texts(documents))
        self._committer.wait()
        self.abandon()

    def abandon(self) -> None:
        """Remove what was written and not committed."""
        shutil.rmtree(self._staging, ignore_errors=True)
        self._committer.close()

    def __enter__(self) -> "RecordWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.abandon()

    def _failed(self, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"checkpoint directory '{self.directory}' cannot be written ({store.reason(error)}); "
            "make room or choose another directory"
        )
