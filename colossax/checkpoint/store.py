"""Records on disk: zarr version 3 arrays, written and read by TensorStore.

Every block carries a CRC-32C, and a file that is missing is an error rather than zeros.
"""

import collections
import errno
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from colossax.checkpoint.layout import Layout
from colossax.checkpoint.manifest import RecordSpec, checked_layout, describe, sizes
from colossax.checkpoint.seals import BYTE_ORDER
from colossax.checkpoint.slots import Box, box_slices
from colossax.documents import member, parse_json

CHECKED_BYTES = [{"name": "bytes", "configuration": {"endian": BYTE_ORDER}}, {"name": "crc32c"}]
_SINGLE_BYTES = [{"name": "bytes"}, {"name": "crc32c"}]


def open_for_writing(
    folder: Path, shape: tuple[int, ...], dtype: np.dtype, layout: Layout, *, create: bool
) -> Any:
    """Open a record to be written.

    Args:
        folder: Of the record.
        shape: Of the record.
        dtype: Of the record.
        layout: Shapes of its files and blocks.
        create: Whether to write its metadata; one process does, the others take it for granted.
    """
    import tensorstore

    spec = _spec(folder) | {
        "metadata": {
            "shape": list(shape),
            "data_type": dtype.name,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": _chunk_shape(layout)},
            },
            "codecs": _codecs(layout),
        },
        "store_data_equal_to_fill_value": True,
    }
    if create:
        return tensorstore.open(spec, create=True).result()
    return tensorstore.open(spec, open=True, assume_metadata=True).result()


def open_for_reading(folder: Path) -> Any:
    """Open a record that is complete.

    Raises:
        ValueError: Its metadata is missing or damaged.
    """
    import tensorstore

    return tensorstore.open(_spec(folder), open=True).result()


def _spec(folder: Path) -> dict[str, Any]:
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": os.fspath(folder.absolute())},
        "fill_missing_data_reads": False,
    }


def stored_layout(content: bytes, spec: RecordSpec) -> Layout:
    """Files and blocks of a record, from its `zarr.json`, if we could have written that.

    Everything that TensorStore takes from the file is looked at: what else it says would decide
    how bytes are read, or how much memory is taken for them.

    Raises:
        ValueError: It is damaged, forged, or of another record.
    """
    metadata = parse_json(content)
    shape = sizes(member(metadata, "shape", list), "it")
    if (shape, found := member(metadata, "data_type", str)) != (spec.shape, spec.dtype.name):
        raise ValueError(f"it is {found}{list(shape)}, not {describe(spec)}")
    grid = member(metadata, "chunk_grid", dict)
    file = sizes(member(member(grid, "configuration", dict), "chunk_shape", list), "its grid")
    block = sizes(_block_shape(member(metadata, "codecs", list), file), "its codec")
    layout = checked_layout(spec.shape, file, block, "it")
    ours = _as_written(spec, layout)
    for key, value in metadata.items():
        if key != "fill_value" and value not in ours.get(key, []):
            raise ValueError(f"its {key} is {json.dumps(value)[:200]}, which we do not write")
    return layout


def _block_shape(codecs: list[Any], file: tuple[int, ...]) -> list[int]:
    first = codecs[0] if codecs else {}
    if member(first, "name", str, of="its codec") != "sharding_indexed":
        return list(file)
    return member(member(first, "configuration", dict), "chunk_shape", list)


def _as_written(spec: RecordSpec, layout: Layout) -> dict[str, list[Any]]:
    """What may stand under each key of a `zarr.json` of ours.

    TensorStore leaves out what says nothing: the byte order of single bytes, the usual separator.
    """
    slash = {"name": "default", "configuration": {"separator": "/"}}
    grid = {"name": "regular", "configuration": {"chunk_shape": _chunk_shape(layout)}}
    single = [_codecs(layout, _SINGLE_BYTES)] if spec.dtype.itemsize == 1 else []
    return {
        "zarr_format": [3],
        "node_type": ["array"],
        "shape": [list(spec.shape)],
        "data_type": [spec.dtype.name],
        "chunk_grid": [grid],
        "chunk_key_encoding": [{"name": "default"}, slash],
        "codecs": [_codecs(layout), *single],
        "attributes": [{}],
    }


def _chunk_shape(layout: Layout) -> list[int]:
    return [max(1, n) for n in layout.file]


def _codecs(layout: Layout, bytes_codecs: list[Any] = CHECKED_BYTES) -> list[dict[str, Any]]:
    if layout.block == layout.file:
        return bytes_codecs
    return [
        {
            "name": "sharding_indexed",
            "configuration": {
                "chunk_shape": list(layout.block),
                "codecs": bytes_codecs,
                "index_codecs": CHECKED_BYTES,
            },
        }
    ]


def start_write(store: Any, box: Box, data: np.ndarray) -> Any:
    """Start writing one whole file; `data` must stay as it is until the future is done."""
    return store[box_slices(box)].write(data, can_reference_source_data_indefinitely=True)


def start_read(store: Any, box: Box) -> Any:
    """Start reading a region; the future's result is an array of its shape."""
    return store[box_slices(box)].read()


class InFlight:
    """Reads or writes under way, kept below a number of bytes.

    Attributes:
        limit_bytes: One transfer may exceed it when it is alone.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._bytes = 0
        self._waiting: collections.deque[tuple[int, Any, Callable[[Any], None]]] = (
            collections.deque()
        )

    def add(
        self,
        size_bytes: int,
        start: Callable[[], Any],
        done: Callable[[Any], Any] = lambda future: future.result(),
    ) -> None:
        """Start a transfer once there is room; `done` is later given its future, to wait for."""
        while self._waiting and self._bytes + size_bytes > self.limit_bytes:
            self._finish_oldest()
        self._waiting.append((size_bytes, start(), done))
        self._bytes += size_bytes

    def finish(self) -> None:
        """Wait for all."""
        while self._waiting:
            self._finish_oldest()

    def abandon(self) -> None:
        """Wait for all and forget their results, after one of them failed."""
        while self._waiting:
            self._waiting.popleft()[1].exception()

    def _finish_oldest(self) -> None:
        size_bytes, future, done = self._waiting.popleft()
        self._bytes -= size_bytes
        done(future)


def array_bytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    """Bytes of an array."""
    return math.prod(shape) * dtype.itemsize


def reason(error: Exception) -> str:
    """What went wrong, in few words: the system's where it has some, else TensorStore's."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error).split(" [tensorstore_spec=")[0].split(" [source locations=")[0]
    if (system := re.search(r"([^:]+) \[os_error_code", text)) is not None:
        return system.group(1).strip()
    return re.sub(r"^[A-Z_]+: ", "", text).strip().rstrip(".") or type(error).__name__


def is_damage(error: Exception) -> bool:
    """Whether a failed read says that bytes are wrong or gone, and not that reading is hindered.

    Too many open files, no permission, a device or network that does not answer: a later try may
    do better.
    """
    if isinstance(error, OSError):
        return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
    return not re.match(r"(RESOURCE_EXHAUSTED|PERMISSION_DENIED|UNAVAILABLE|ABORTED)", str(error))


def write_durably(path: Path, content: bytes) -> None:
    """Write a small file and flush it to the disk."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def orbax_tree(paths: list[tuple[str, ...]]) -> bytes:
    """`_METADATA` with which Orbax alone reads the records of a folder as a nested dict."""
    leaf = {"value_type": "np.ndarray", "skip_deserialize": False}
    dict_key = 2
    tree = {
        str(path): {
            "key_metadata": [{"key": key, "key_type": dict_key} for key in path],
            "value_metadata": leaf,
        }
        for path in paths
    }
    return json.dumps({"tree_metadata": tree, "use_ocdbt": False, "use_zarr3": True}).encode()
