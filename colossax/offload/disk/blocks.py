"""The blocks that say what the rest of a store's file is: of the file, of a record, of a commit.

Each is little-endian, ends in a checksum of itself and is padded with zeros to whole blocks.
"""

import dataclasses
import json
import struct
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from colossax.offload.disk.checksum import DIGEST_BYTES
from colossax.offload.disk.layout import BLOCK_BYTES, in_blocks

VERSION = 1

_FILE = struct.Struct("<8sIQ")  # magic, version, bytes of JSON; then the JSON and its crc32
_FILE_MAGIC = b"clxstore"
_RECORD = struct.Struct(f"<8sIQQQ{DIGEST_BYTES}s")
_RECORD_MAGIC = b"clxrecrd"
_COMMIT = struct.Struct("<8sIQQ")  # magic, version, epoch, bytes of the tail; then tail and crc32
_COMMIT_MAGIC = b"clxcommt"
_CRC = struct.Struct("<I")


@dataclasses.dataclass(frozen=True)
class FileBlock:
    """What the file is: its records, their arrays, room for the tail.

    Attributes:
        records: How many.
        tail_bytes: Largest tail of a commit.
        rows: Name, shape and dtype of each array, in the order in which they lie.
        owner: Whose it is, in words of the caller; empty where it was not said.
    """

    records: int
    tail_bytes: int
    rows: list[list[Any]]
    owner: str = ""

    def to_bytes(self) -> bytes:
        """As it stands at the beginning of the file, whole blocks."""
        text = json.dumps(dataclasses.asdict(self)).encode()
        return _sealed(_FILE.pack(_FILE_MAGIC, VERSION, len(text)) + text)

    @staticmethod
    def size_bytes(first: bytes) -> int | None:
        """Bytes of the whole, from the first block; None where that is no store's.

        Raises:
            NotImplementedError: It is a store's of another version; the message is the version.
        """
        magic, version, text_bytes = _FILE.unpack_from(first)
        if magic != _FILE_MAGIC:
            return None
        if version != VERSION:
            raise NotImplementedError(str(version))
        return in_blocks(_FILE.size + text_bytes + _CRC.size)

    @classmethod
    def from_bytes(cls, data: bytes) -> "FileBlock | None":
        """What `to_bytes` gave, None where a byte of it changed."""
        _, _, text_bytes = _FILE.unpack_from(data)
        if not _intact(data, _FILE.size + text_bytes):
            return None
        return cls(**json.loads(data[_FILE.size : _FILE.size + text_bytes]))


@dataclasses.dataclass(frozen=True)
class RecordBlock:
    """What lies behind it: which record, of which epoch, with which checksum."""

    record: int
    epoch: int
    payload_bytes: int
    checksum: bytes

    def to_bytes(self) -> bytes:
        """One block."""
        fields = (self.record, self.epoch, self.payload_bytes, self.checksum)
        return _sealed(_RECORD.pack(_RECORD_MAGIC, VERSION, *fields))

    @classmethod
    def from_bytes(cls, data: bytes) -> "RecordBlock | None":
        """What `to_bytes` gave, None where a byte of it changed or nothing was written yet."""
        magic, version, *fields = _RECORD.unpack_from(data)
        if (magic, version) != (_RECORD_MAGIC, VERSION) or not _intact(data, _RECORD.size):
            return None
        return cls(*fields)


@dataclasses.dataclass(frozen=True)
class CommitBlock:
    """That all records of an epoch are on the disk, and the caller's bytes that belong to them."""

    epoch: int
    tail: bytes

    @staticmethod
    def fill(buffer: np.ndarray, epoch: int, tail: Iterable[np.ndarray], most: int) -> int:
        """Write one into uint8[room_bytes(most)]; how many bytes of it are taken, whole blocks.

        Args:
            buffer: Of zeros.
            epoch: Which.
            tail: Parts of it, one of which is in memory at a time.
            most: Bytes that it may have.

        Raises:
            BufferError: It has more; the message is its bytes so far.
        """
        end = _COMMIT.size
        for part in tail:
            start, end = end, end + part.nbytes
            if end - _COMMIT.size > most:
                raise BufferError(str(end - _COMMIT.size))
            buffer[start:end] = part.reshape(-1).view(np.uint8)
        view = buffer.data
        _COMMIT.pack_into(view, 0, _COMMIT_MAGIC, VERSION, epoch, end - _COMMIT.size)
        _CRC.pack_into(view, end, zlib.crc32(view[:end]))
        return in_blocks(end + _CRC.size)

    @staticmethod
    def room_bytes(tail_bytes: int) -> int:
        """Bytes of the largest one."""
        return in_blocks(_COMMIT.size + tail_bytes + _CRC.size)

    @classmethod
    def from_bytes(cls, data: bytes) -> "CommitBlock | None":
        """What `to_bytes` gave, None where a byte of it changed or nothing was written yet."""
        magic, version, epoch, tail_bytes = _COMMIT.unpack_from(data)
        if (magic, version) != (_COMMIT_MAGIC, VERSION):
            return None
        end = _COMMIT.size + tail_bytes
        return cls(epoch, data[_COMMIT.size : end]) if _intact(data, end) else None


def _sealed(content: bytes) -> bytes:
    sealed = content + _CRC.pack(zlib.crc32(content))
    return sealed.ljust(in_blocks(len(sealed)), b"\0")


def _intact(data: bytes, end: int) -> bool:
    return end + _CRC.size <= len(data) and _CRC.unpack_from(data, end)[0] == zlib.crc32(data[:end])


assert _RECORD.size + _CRC.size <= BLOCK_BYTES, "a record's block must be one block"
