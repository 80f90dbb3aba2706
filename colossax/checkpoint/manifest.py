"""The manifest of a step: what the step holds, and what each of its files is known by."""

import dataclasses
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from colossax.checkpoint.layout import Layout
from colossax.checkpoint.seals import BYTE_ORDER, grid_of
from colossax.checkpoint.slots import record_folder
from colossax.documents import as_kind, member, parse_json

VERSION = 2
"""Version 1 knew neither the step nor seals."""

RESERVED_NAMES = ("arrays", "metrics")
"""Orbax has uses of its own for items named like this."""

_MOST_DIMS = 32
_MOST_BYTES = 1 << 60


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordSpec:
    """One record on disk.

    Attributes:
        shape: Of the whole record.
        dtype: On disk.
        layered: Whether dim 0 counts the layers of a stack.
        experts: Dim that counts experts, each of which lies in blocks of its own; None where there
            is none, or the step was written before they did.
        format: How the record's arrays make up the parameter; `plain` is one array.
        layout: Shapes of its files and blocks; None where the manifest does not say.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    layered: bool = False
    experts: int | None = None
    format: str = "plain"
    layout: Layout | None = None

    @property
    def files(self) -> int:
        """How many files it has."""
        return 0 if self.layout is None else math.prod(grid_of(self.shape, self.layout.file))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a finished step holds.

    Attributes:
        records: By name, in the order they were saved.
        documents: CRC-32 of each document's text.
        step: Which; None in version 1, and then there are no seals and no metadata.
        seals: Of each record's files, in C order of their places.
        metadata: CRC-32 of each `zarr.json` and `_METADATA`, by path below the item.
    """

    records: Mapping[str, RecordSpec]
    documents: Mapping[str, int]
    step: int | None = None
    seals: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)
    metadata: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def to_json(self) -> bytes:
        """As a file of version 2 that tells when it was damaged."""
        records = {
            name: {
                "shape": list(spec.shape),
                "dtype": spec.dtype.name,
                "layered": spec.layered,
                **({} if spec.experts is None else {"experts": spec.experts}),
                "format": spec.format,
                "byte_order": BYTE_ORDER,
                "file": list(spec.layout.file),
                "block": list(spec.layout.block),
                "seals": list(self.seals[name]),
            }
            for name, spec in self.records.items()
            if spec.layout is not None
        }
        body = json.dumps(
            {
                "step": self.step,
                "records": records,
                "documents": dict(self.documents),
                "metadata": dict(self.metadata),
            }
        )
        return json.dumps(
            {"version": VERSION, "crc32": zlib.crc32(body.encode()), "body": body}
        ).encode()

    @classmethod
    def from_json(cls, content: bytes) -> "Manifest":
        """Read back, version 1 too; every value is looked at before it is believed.

        Raises:
            ValueError: It is damaged, forged or of another version; the message is the reason.
        """
        outer = parse_json(content)
        version = member(outer, "version", int)
        if version not in (1, VERSION):
            raise ValueError(f"it has version {version}, this library reads 1 and {VERSION}")
        text = member(outer, "body", str)
        if zlib.crc32(text.encode()) != member(outer, "crc32", int):
            raise ValueError("its checksum does not match")
        body = parse_json(text)
        documents = _checksums(member(body, "documents", dict))
        for name in documents:
            check_document_name(name)
        found = member(body, "records", dict)
        records = {name: _record(name, value, version) for name, value in found.items()}
        if version == 1:
            return cls(records=records, documents=documents)
        return cls(
            records=records,
            documents=documents,
            step=member(body, "step", int),
            seals={name: _seals(found[name], spec) for name, spec in records.items()},
            metadata=_checksums(member(body, "metadata", dict)),
        )


def check_document_name(name: str) -> None:
    """Refuse a name that no document may have.

    Raises:
        ValueError: It is taken, or no identifier.
    """
    if name in RESERVED_NAMES or not name.isidentifier():
        raise ValueError(f"no document may be named '{name}'")


def describe(spec: RecordSpec) -> str:
    """`float32[4, 8]`."""
    return f"{spec.dtype.name}{list(spec.shape)}"


def _record(name: str, value: Any, version: int) -> RecordSpec:
    record_folder(name)
    of = f"record '{name}'"
    shape = sizes(member(value, "shape", list, of=of), of)
    dtype = _dtype(member(value, "dtype", str, of=of), of)
    if math.prod(max(1, n) for n in shape) * dtype.itemsize > _MOST_BYTES:
        raise ValueError(f"{of} is {dtype.name}{list(shape)}, larger than any disk")
    if (layered := member(value, "layered", bool, of=of)) and not shape:
        raise ValueError(f"{of} is a stack without layers")
    layout = None
    if version > 1:
        if (order := member(value, "byte_order", str, of=of)) != BYTE_ORDER:
            raise ValueError(f"{of} has byte order '{order}', not '{BYTE_ORDER}'")
        file, block = (sizes(member(value, key, list, of=of), of) for key in ("file", "block"))
        layout = checked_layout(shape, file, block, of)
    return RecordSpec(
        shape=shape,
        dtype=dtype,
        layered=layered,
        experts=_experts(value, shape, layout, of),
        format=_plain(member(value, "format", str, of=of), of),
        layout=layout,
    )


def _experts(
    value: dict[str, Any], shape: tuple[int, ...], layout: Layout | None, of: str
) -> int | None:
    """The dim that counts experts, where the manifest says one."""
    if layout is None or "experts" not in value:
        return None
    dim = member(value, "experts", int, of=of)
    if not 0 <= dim < len(shape) or layout.block[dim] != 1:
        raise ValueError(f"{of} {list(shape)} is said to hold an expert at a time in dim {dim}")
    return dim


def _plain(name: str, of: str) -> str:
    if name != "plain":
        raise ValueError(f"{of} has format '{name}', this library reads 'plain'")
    return name


def sizes(value: list[Any], of: str) -> tuple[int, ...]:
    """A shape, from JSON.

    Raises:
        ValueError: A size is no integer, or less than 0; or there are too many.
    """
    if len(value) > _MOST_DIMS:
        raise ValueError(f"{of} has {len(value)} dims, at most {_MOST_DIMS} are read")
    if bad := [n for n in value if as_kind(n, int, f"a size of {of}") < 0]:
        raise ValueError(f"{of} has a size of {bad[0]}")
    return tuple(value)


def checked_layout(
    shape: tuple[int, ...], file: tuple[int, ...], block: tuple[int, ...], of: str
) -> Layout:
    """Files and blocks of a record, if they are such as are written.

    Raises:
        ValueError: A file is larger than its record, or is not made up of whole blocks.
    """
    within = len(shape) == len(file) == len(block) and all(
        1 <= f <= max(1, n) and 1 <= b <= f and f % b == 0
        for n, f, b in zip(shape, file, block, strict=True)
    )
    if not within:
        raise ValueError(f"{of} {list(shape)} is said to have files {list(file)} of {list(block)}")
    return Layout(file=file, block=block)


def _dtype(name: str, of: str) -> np.dtype:
    """A dtype of plain numbers; others stand for Python's objects, dates or texts."""
    try:
        dtype = np.dtype(name if name.isidentifier() else object)
    except (TypeError, ValueError):
        dtype = np.dtype(object)
    plain = jax.numpy.issubdtype(dtype, np.number) and dtype.kind not in "mMOSU"
    if dtype.name != name or not (plain or dtype.kind == "b"):
        raise ValueError(f"{of} has dtype '{name}', which is not one of numbers")
    return dtype


def _seals(value: Any, spec: RecordSpec) -> list[int]:
    seals = member(value, "seals", list)
    if len(seals) != spec.files or not all(type(seal) is int for seal in seals):
        raise ValueError(f"a record of {spec.files} files has {len(seals)} seals")
    return seals


def _checksums(value: dict[str, Any]) -> dict[str, int]:
    return {name: as_kind(crc, int, f"the checksum of '{name}'") for name, crc in value.items()}
