"""Safetensors files read and written one tensor, or a few rows of one, at a time.

A file is an 8-byte little-endian header length, a JSON header (per tensor its type, shape and byte
range) and the numbers. A folder holds `model.safetensors`, or several files with an index. Plain
reads into a buffer of our own keep the host memory at what is asked for; a memory map would count
every page touched.
"""

import dataclasses
import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from colossax.documents import as_kind, member, parse_json, read_json
from colossax.errors import WeightsError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype("float32"),
    "F16": np.dtype("float16"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_READ = {
    **DTYPES,
    "U8": np.dtype("uint8"),
    "I8": np.dtype("int8"),
    "I32": np.dtype("int32"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where a tensor lies: `dtype` is the format's code, `start` the byte in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers, for a type that can be read."""
        return math.prod(self.shape) * _READ[self.dtype].itemsize


class Reader:
    """The tensors of a folder, by name; nothing is read before it is asked for.

    Raises:
        WeightsError: The folder has no weights, lacks a file of its index, or a file is damaged.
    """

    def __init__(self, folder: Path, files: Sequence[Path] | None = None):
        """Read what files say of their tensors.

        Args:
            folder: Holds them.
            files: Default those of a model.
        """
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        for file in _weight_files(folder) if files is None else files:
            if not file.is_file():
                raise WeightsError(f"{file}: is missing; copy it too")
            self.tensors.update(read_header(file))

    def read(self, name: str, first: int = 0, rows: int | None = None) -> np.ndarray:
        """A tensor, or `rows` of its rows from `first` on. Cost: the bytes of the result."""
        stored = self.tensors[name]
        dtype = _READ[stored.dtype]
        shape = stored.shape if rows is None else (rows, *stored.shape[1:])
        row_bytes = math.prod(stored.shape[1:]) * dtype.itemsize
        out = np.empty(shape, dtype)
        with stored.file.open("rb", buffering=0) as file:
            file.seek(stored.start + first * row_bytes)
            _read_into(file, out, stored.file)
        return out


def _weight_files(folder: Path) -> list[Path]:
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.is_file():
        raise WeightsError(
            f"{folder}: holds neither {SINGLE} nor {INDEX}; name a folder with a model saved as"
            f" safetensors"
        )
    remedy = "copy the file again"
    document = read_json(index, remedy=remedy, error=WeightsError)
    try:
        where = member(document, "weight_map", dict)
        names = sorted({as_kind(name, str, "a file's name") for name in where.values()})
    except ValueError as problem:
        raise WeightsError(f"{index}: is no index of weights ({problem}); {remedy}") from problem
    for name in names:
        if Path(name).name != name or name in ("", "..", "."):
            raise WeightsError(
                f"{index}: names '{name}', which is no file of its own folder; {remedy}"
            )
        if not (folder / name).is_file():
            raise WeightsError(f"{folder / name}: is missing, but {INDEX} names it; copy it too")
    return [folder / name for name in names]


def read_header(file: Path) -> dict[str, StoredTensor]:
    """All tensors of one file.

    Raises:
        WeightsError: It is not a whole safetensors file.
    """
    size = file.stat().st_size
    with file.open("rb") as source:
        head = source.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise _damaged(file, f"its {size} bytes do not hold a header")
        try:
            header = parse_json(source.read(length))
            header.pop("__metadata__", None)
            end = 8 + length + _total_bytes(header)
            tensors = {name: _stored(file, entry, 8 + length) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise _damaged(file, "its header is not that of a safetensors file") from problem
    if size != end:
        raise _damaged(file, f"it has {size} bytes where its header promises {end}")
    return tensors


def _total_bytes(header: Mapping[str, Any]) -> int:
    """Bytes of all tensors, which must follow one another without gap or overlap."""
    position = 0
    for first, last in sorted(_whole(entry["data_offsets"]) for entry in header.values()):
        if first != position or last < first:
            raise ValueError(f"bytes {first} to {last} where {position} should begin")
        position = last
    return position


def _stored(file: Path, entry: Mapping[str, Any], base: int) -> StoredTensor:
    first, last = entry["data_offsets"]
    shape = tuple(_whole(entry["shape"]))
    stored = StoredTensor(file=file, dtype=entry["dtype"], shape=shape, start=base + first)
    if stored.dtype in _READ and stored.nbytes != last - first:
        raise ValueError(f"{stored} does not fill {last - first} bytes")
    return stored


def _whole(numbers: Any) -> list[int]:
    """Sizes or positions as a header has them."""
    if not all(type(number) is int and number >= 0 for number in as_kind(numbers, list, "a size")):
        raise ValueError(f"{numbers} are no sizes")
    return numbers


def _damaged(file: Path, why: str) -> WeightsError:
    return WeightsError(f"{file}: is damaged or cut short, {why}; copy it again")


def _read_into(file: Any, out: np.ndarray, name: Path) -> None:
    """Fill `out`; one read call stops at 2 GB."""
    rest = out.reshape(-1).view(np.uint8).data
    while rest:
        count = file.readinto(rest)
        if not count:
            raise _damaged(name, "it ended while it was being read")
        rest = rest[count:]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutTensor:
    """A tensor to be written; `blocks` yields its numbers in order, in arrays of any size."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    blocks: Callable[[], Iterable[np.ndarray]]

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_folder(folder: Path, tensors: list[OutTensor], *, max_shard_bytes: int) -> None:
    """Write tensors into one file, or into several of at most `max_shard_bytes` with an index.

    A tensor larger than that has a file of its own. Cost: the memory of one block.
    """
    shards = list(_shards(tensors, max_shard_bytes))
    if len(shards) == 1:
        write_file(folder / SINGLE, shards[0])
        return
    where = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(folder / name, shard)
        where.update({tensor.name: name for tensor in shard})
    total = sum(tensor.nbytes for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _shards(tensors: list[OutTensor], max_bytes: int) -> Iterator[list[OutTensor]]:
    shard: list[OutTensor] = []
    shard_bytes = 0
    for tensor in tensors:
        if shard and shard_bytes + tensor.nbytes > max_bytes:
            yield shard
            shard, shard_bytes = [], 0
        shard.append(tensor)
        shard_bytes += tensor.nbytes
    yield shard


def write_file(file: Path, tensors: list[OutTensor]) -> None:
    """Write one file; tensors of one type stay in the order given."""
    # Wide types first: readers map the file into memory and need aligned numbers.
    tensors = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        offsets = [position, position + tensor.nbytes]
        code = _CODES[tensor.dtype]
        header[tensor.name] = {"dtype": code, "shape": tensor.shape, "data_offsets": offsets}
        position = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            _write_tensor(out, tensor)


def _write_tensor(out: BinaryIO, tensor: OutTensor) -> None:
    start = out.tell()
    for block in tensor.blocks():
        out.write(np.ascontiguousarray(block, tensor.dtype).reshape(-1).view(np.uint8).data)
    assert out.tell() - start == tensor.nbytes, tensor.name
