"""A checkpoint directory as a reader sees it: finished steps, their records and documents.

    <directory>/<step>/arrays/manifest.json                     what the step holds
    <directory>/<step>/arrays/<model>/<kind>/<path>/zarr.json   one record, see `store`
    <directory>/<step>/<document>/metadata                      one JSON value

A step folder appears whole, by a rename, when it is finished; reading needs no Orbax.
"""

import dataclasses
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from colossax.checkpoint import store
from colossax.checkpoint.slots import record_folder
from colossax.errors import CheckpointError

ARRAYS_ITEM = "arrays"
MANIFEST = "manifest.json"
DOCUMENT_FILE = "metadata"
UNFINISHED = ".orbax-checkpoint-tmp"
_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordSpec:
    """One record on disk.

    Attributes:
        shape: Of the whole record.
        dtype: On disk.
        layered: Whether dim 0 counts the layers of a stack.
        format: How the record's arrays make up the parameter; `plain` is one array.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    layered: bool = False
    format: str = "plain"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a finished step holds.

    Attributes:
        records: By name, in the order they were saved.
        documents: CRC-32 of each document's text.
    """

    records: Mapping[str, RecordSpec]
    documents: Mapping[str, int]

    def to_json(self) -> bytes:
        """As a file that tells when it was damaged."""
        records = {
            name: {
                "shape": list(spec.shape),
                "dtype": spec.dtype.name,
                "layered": spec.layered,
                "format": spec.format,
            }
            for name, spec in self.records.items()
        }
        body = json.dumps({"records": records, "documents": dict(self.documents)})
        return json.dumps(
            {"version": _VERSION, "crc32": zlib.crc32(body.encode()), "body": body}
        ).encode()

    @classmethod
    def from_json(cls, content: bytes) -> "Manifest":
        """Read back.

        Raises:
            ValueError, KeyError, TypeError: It is damaged or of another version.
        """
        outer = json.loads(content)
        if outer["version"] != _VERSION:
            raise ValueError(f"it has version {outer['version']}, this library reads {_VERSION}")
        if zlib.crc32(outer["body"].encode()) != outer["crc32"]:
            raise ValueError("its checksum does not match")
        body = json.loads(outer["body"])
        records = {
            name: RecordSpec(
                shape=tuple(spec["shape"]),
                dtype=np.dtype(spec["dtype"]),
                layered=spec["layered"],
                format=spec["format"],
            )
            for name, spec in body["records"].items()
        }
        return cls(records=records, documents=body["documents"])


def finished_steps(directory: Path) -> list[int]:
    """Finished steps, ascending; empty where there is no such directory."""
    if not directory.is_dir():
        return []
    return sorted(
        int(entry.name)
        for entry in directory.iterdir()
        if entry.name.isdecimal() and (entry / ARRAYS_ITEM / MANIFEST).is_file()
    )


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
        path = self.path / ARRAYS_ITEM / MANIFEST
        try:
            self.manifest = Manifest.from_json(path.read_bytes())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise self.damaged(f"'{path}'", error) from error

    @property
    def path(self) -> Path:
        """Of the step."""
        return self.directory / str(self.step)

    def __str__(self) -> str:
        return f"checkpoint '{self.directory}' step {self.step}"

    def damaged(self, what: str, error: Exception) -> CheckpointError:
        """The refusal of something unreadable."""
        others = [n for n in finished_steps(self.directory) if n != self.step]
        remedy = f"restore step {others[-1]} instead" if others else "restore it from a copy"
        return CheckpointError(
            f"{self} is damaged: {what} cannot be read ({store.reason(error)}); {remedy}"
        )

    def documents(self) -> dict[str, Any]:
        """All JSON documents by name.

        Raises:
            CheckpointError: One is missing or damaged.
        """
        return {name: self._document(name) for name in self.manifest.documents}

    def _document(self, name: str) -> Any:
        path = self.path / name / DOCUMENT_FILE
        try:
            content = path.read_bytes()
            if zlib.crc32(content) != self.manifest.documents[name]:
                raise ValueError("its checksum does not match")
            return json.loads(content)
        except (OSError, ValueError) as error:
            raise self.damaged(f"document '{name}'", error) from error

    def open_record(self, name: str) -> Any:
        """TensorStore handle of a record.

        Raises:
            CheckpointError: Its metadata is missing, damaged, or not what the manifest says.
        """
        spec = self.manifest.records[name]
        try:
            handle = store.open_for_reading(self.path / ARRAYS_ITEM / record_folder(name))
            actual = (tuple(handle.shape), handle.dtype.numpy_dtype)
            if actual != (spec.shape, spec.dtype):
                raise ValueError(f"it is {actual[1]}{list(actual[0])}, not {describe(spec)}")
        except (OSError, ValueError) as error:
            raise self.damaged(f"record '{name}'", error) from error
        return handle


def describe(spec: RecordSpec) -> str:
    """`float32[4, 8]`."""
    return f"{spec.dtype.name}{list(spec.shape)}"


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
        raise CheckpointError(
            f"checkpoint directory '{directory}' holds no step {step}; choose one of "
            f"{', '.join(map(str, steps))}"
        )
    return steps[-1] if step is None else step
