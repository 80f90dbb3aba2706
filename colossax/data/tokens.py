"""The tokens of a corpus on disk; each block is compared with its checksum when first read."""

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from colossax.errors import DataError

BLOCK_BYTES = 65_536
"""A row of a shuffled corpus touches a block or two, and reads no more of the disk for them."""


class CheckedTokens:
    """Tokens `[length]` in a file. A block is verified before its first token is handed out.

    Args:
        file: The tokens, in the byte order of the machine.
        dtype: uint16 or uint32.
        checksums: uint64 `[blocks]`, as `block_checksums` made them.
        repair: Builds the file again from its source; called when a block is wrong.

    Cost: 65 microseconds per block, once; then one look-up per token asked for. A byte of memory
    per block of 64 KiB. Several threads may read.
    """

    def __init__(
        self,
        file: Path,
        dtype: np.dtype,
        checksums: np.ndarray,
        *,
        repair: Callable[[], object],
    ):
        self.dtype = dtype
        self._file = file
        self._checksums = checksums
        self._repair = repair
        self._per_block = BLOCK_BYTES // dtype.itemsize
        self._lock = threading.Lock()
        self._mapped = self._map()

    def __len__(self) -> int:
        return len(self._mapped.tokens)

    def __getitem__(self, index: slice | np.ndarray) -> np.ndarray:
        """Tokens of a slice without steps, or at these places.

        Raises:
            DataError: A block is wrong and cannot be made again.
        """
        blocks = self._blocks(index)
        mapped = self._mapped
        if not mapped.verified[blocks].all():
            with self._lock:
                mapped = self._verified(blocks)
        return mapped.tokens[index]

    def _blocks(self, index: slice | np.ndarray) -> slice | np.ndarray:
        if not isinstance(index, slice):
            return index // self._per_block
        start, stop, _ = index.indices(len(self))
        return slice(start // self._per_block, -(-stop // self._per_block))

    def _verified(self, blocks: slice | np.ndarray) -> "_Mapped":
        """The file with these blocks verified; built again where one is wrong."""
        for attempt in ("as found", "repaired"):
            mapped = self._mapped
            wrong = self._first_wrong(mapped, np.unique(np.arange(len(self._checksums))[blocks]))
            if wrong is None:
                return mapped
            if attempt == "as found":
                self._repair()
                self._mapped = self._map()
        raise DataError(
            f"{self._file}: block {wrong} is wrong again right after it was built from the text;"
            f" the text has changed since the run began, or the disk is failing: start again"
        )

    def _first_wrong(self, mapped: "_Mapped", blocks: np.ndarray) -> int | None:
        for block in blocks[~mapped.verified[blocks]].tolist():
            data = mapped.tokens[block * self._per_block :][: self._per_block]
            if checksum(data) != self._checksums[block]:
                return block
            mapped.verified[block] = True
        return None

    def _map(self) -> "_Mapped":
        # A view without memmap's subclass, whose every slice costs a microsecond more.
        tokens = np.asarray(np.memmap(self._file, dtype=self.dtype, mode="r"))
        return _Mapped(tokens, np.zeros(len(self._checksums), bool))


class _Mapped(NamedTuple):
    tokens: np.ndarray
    verified: np.ndarray


def checksum(data: np.ndarray) -> np.uint64:
    """BLAKE2b of a contiguous array's bytes, cut to 64 bits."""
    digest = hashlib.blake2b(data.data, digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def block_checksums(file: Path) -> np.ndarray:
    """uint64 `[blocks]`: the checksum of each `BLOCK_BYTES` of a file, the last may be shorter."""
    data = np.memmap(file, dtype=np.uint8, mode="r")
    starts = range(0, len(data), BLOCK_BYTES)
    return np.array([checksum(data[start : start + BLOCK_BYTES]) for start in starts], np.uint64)
