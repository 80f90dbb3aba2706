"""A checkpoint directory as a reader sees it: finished steps, their records and documents.

    <directory>/<step>/arrays/manifest.json                     what the step holds
    <directory>/<step>/arrays/<model>/<kind>/<path>/zarr.json   one record, see `store`
    <directory>/<step>/<document>/metadata                      one JSON value

A step folder appears whole, by a rename, when it is finished; reading needs no Orbax. What is read
is compared with the manifest first, see `seals`.
"""

import time
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from colossax.checkpoint import store
from colossax.checkpoint.layout import Layout
from colossax.checkpoint.manifest import Manifest
from colossax.checkpoint.seals import (
    Place,
    check_length,
    file_at,
    grid_of,
    header_of,
    number_in,
    places_in,
    seal,
)
from colossax.checkpoint.slots import Box, record_folder
from colossax.documents import ANY_KIND, parse_json, read_small
from colossax.errors import CheckpointError, CheckpointWarning, DamagedCheckpointError

ARRAYS_ITEM = "arrays"
MANIFEST = "manifest.json"
DOCUMENT_FILE = "metadata"
RECORD_FILE = "zarr.json"
TREE_FILE = "_METADATA"
UNFINISHED = ".orbax-checkpoint-tmp"

_DELETING_S = 1.0
"""Between the first and the last file of a step that is deleted."""


def finished_steps(directory: Path) -> list[int]:
    """Finished steps, ascending; empty where there is no such directory."""
    if not directory.is_dir():
        return []
    return sorted(
        int(entry.name)
        for entry in directory.iterdir()
        if is_step(entry.name) and (entry / ARRAYS_ITEM / MANIFEST).is_file()
    )


def is_step(name: str) -> bool:
    """Whether a folder of this name is that of a step."""
    return name.isascii() and name.isdecimal() and str(int(name)) == name


class StepFolder:
    """One finished step, to be read.

    Attributes:
        directory: The checkpoint directory.
        step: Which step.
        manifest: What it holds.
    """

    def __init__(self, directory: Path, step: int | None = None) -> None:
        """Open a step, by default the latest.

        Raises:
            CheckpointError: There is no such directory, no such finished step, or it is damaged.
        """
        self.directory = directory
        self.step = _choose_step(directory, step)
        self._layouts: dict[str, Layout] = {}
        self._checked: set[tuple[str, Place]] = set()
        path = self.path / ARRAYS_ITEM / MANIFEST
        try:
            self.manifest = Manifest.from_json(read_small(path))
            if self.manifest.step not in (None, self.step):
                raise ValueError(f"it is that of step {self.manifest.step}")
        except (OSError, ValueError) as error:
            raise self.damaged(f"'{path}'", error) from error
        if self.manifest.step is None:
            _warn_of_version_1(str(self))

    @property
    def path(self) -> Path:
        """Of the step."""
        return self.directory / str(self.step)

    def __str__(self) -> str:
        return f"checkpoint '{self.directory}' step {self.step}"

    def damaged(self, what: str, error: Exception) -> CheckpointError:
        """The refusal of something unreadable; of a step that is being deleted, it says so."""
        others = [n for n in finished_steps(self.directory) if n != self.step]
        if others and self.step < others[-1] and self._goes_away():
            return CheckpointError(
                f"{self} was deleted while it was read, as a run that goes on deletes all but its"
                f" latest (--keep); read step {others[-1]}, or start again"
            )
        remedy = f"restore step {others[-1]} instead" if others else "restore it from a copy"
        reason = store.reason(error)
        if isinstance(error, OSError) and error.filename and str(error.filename) not in what:
            reason = f"'{error.filename}': {reason}"
        kind = DamagedCheckpointError if store.is_damage(error) else CheckpointError
        return kind(f"{self} is damaged: {what} cannot be read ({reason}); {remedy}")

    def _goes_away(self) -> bool:
        """Whether the manifest is gone, or goes with the other files within `_DELETING_S`."""
        manifest = self.path / ARRAYS_ITEM / MANIFEST
        deadline = time.monotonic() + _DELETING_S
        while (there := manifest.exists()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return not there

    def documents(self) -> dict[str, Any]:
        """All JSON documents by name.

        Raises:
            CheckpointError: One is missing or damaged.
        """
        return {name: self._document(name) for name in self.manifest.documents}

    def _document(self, name: str) -> Any:
        path = self.path / name / DOCUMENT_FILE
        try:
            content = read_small(path)
            if zlib.crc32(content) != self.manifest.documents[name]:
                raise ValueError("its checksum does not match")
            return parse_json(content, ANY_KIND)
        except (OSError, ValueError) as error:
            raise self.damaged(f"document '{name}'", error) from error

    def open_record(self, name: str) -> Any:
        """TensorStore handle of a record.

        Raises:
            CheckpointError: Its metadata is missing, damaged, or not what the manifest says.
        """
        try:
            self._layout(name)
            return store.open_for_reading(self._arrays / record_folder(name))
        except (OSError, ValueError) as error:
            raise self.damaged(f"record '{name}'", error) from error

    def check_files(self, name: str, box: Box) -> None:
        """Compare the files that a region of a record lies in with the manifest, once each.

        Of version 1 their lengths alone can be.

        Raises:
            CheckpointError: One is missing, of another length, or belongs elsewhere.
        """
        try:
            layout, folder = self._layout(name), self._arrays / record_folder(name)
            places = [p for p in places_in(box, layout.file) if (name, p) not in self._checked]
            self._check_places(name, folder, layout, places)
            self._checked.update((name, place) for place in places)
        except (OSError, ValueError) as error:
            raise self.damaged(f"record '{name}'", error) from error

    def _check_places(
        self, name: str, folder: Path, layout: Layout, places: Sequence[Place]
    ) -> None:
        spec = self.manifest.records[name]
        if self.manifest.step is None:
            for place in places:
                check_length(file_at(folder, place), layout, spec.dtype)
            return
        header = header_of(self.step, name, spec.dtype, layout)
        grid, seals = grid_of(spec.shape, layout.file), self.manifest.seals[name]
        for place in places:
            found = seal(header, folder, place, layout, spec.dtype)
            if found != seals[number_in(grid, place)]:
                raise ValueError(
                    f"'{file_at(folder, place)}' is not the file that was written there: its values"
                    " are of another place, or damaged"
                )

    def _layout(self, name: str) -> Layout:
        """Files and blocks of a record, after comparing its metadata with the manifest.

        Raises:
            OSError, ValueError: They differ.
        """
        if name not in self._layouts:
            path = record_folder(name)
            content = self._metadata(f"{path}/{RECORD_FILE}")
            spec = self.manifest.records[name]
            layout = store.stored_layout(content, spec)
            if spec.layout is not None and spec.layout != layout:
                raise ValueError(f"its files are {list(layout.file)}, not {list(spec.layout.file)}")
            if self.manifest.step is not None:
                self._metadata(f"{Path(path).parent}/{TREE_FILE}")
            self._layouts[name] = layout
        return self._layouts[name]

    def _metadata(self, path: str) -> bytes:
        """A small file beside the values, if it is what the manifest says, where it says so."""
        content = read_small(self._arrays / path)
        expected = self.manifest.metadata.get(path)
        if self.manifest.step is not None and zlib.crc32(content) != expected:
            raise ValueError(f"the checksum of '{self._arrays / path}' does not match")
        return content

    @property
    def _arrays(self) -> Path:
        return self.path / ARRAYS_ITEM


def _warn_of_version_1(folder: str) -> None:
    """Once a process and step."""
    if folder not in _WARNED:
        _WARNED.add(folder)
        warnings.warn(
            f"{folder} was written before files were bound to their places (version 1): files of it"
            " that were exchanged would go unnoticed; what is saved from now on is bound",
            CheckpointWarning,
            stacklevel=4,
        )


_WARNED: set[str] = set()


def _choose_step(directory: Path, step: int | None) -> int:
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "does not exist"
        raise CheckpointError(
            f"checkpoint directory '{directory}' {what}; give the directory that a training run or"
            " an import wrote"
        )
    if (directory / ARRAYS_ITEM / MANIFEST).is_file():
        raise CheckpointError(
            f"checkpoint directory '{directory}' is one checkpoint; give '{directory.parent}',"
            " which holds it"
        )
    steps = finished_steps(directory)
    if not steps:
        started = sorted(p.name for p in directory.iterdir() if UNFINISHED in p.name)
        unfinished = f" (only unfinished: {', '.join(started)})" if started else ""
        raise CheckpointError(
            f"checkpoint directory '{directory}' holds no finished checkpoint{unfinished}; give "
            "the directory that a training run or an import wrote"
        )
    if step is not None and step not in steps:
        older = ", as a run that goes on deletes all but its latest (--keep)"
        raise CheckpointError(
            f"checkpoint directory '{directory}' holds no step {step}; choose one of "
            f"{', '.join(map(str, steps))}{older if step < steps[0] else ''}"
        )
    return steps[-1] if step is None else step
