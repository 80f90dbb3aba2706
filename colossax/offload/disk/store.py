"""A file of equal records in two epochs: one that is whole, and one that is being written.

An epoch is what all records hold after one update. Updating epoch e writes e + 1 into the slots of
the other parity, so that e stays whole; committing e + 1 waits until its records are on the disk
and then writes its commit, so that from the disk's point of view the epochs change in one moment.
A process may be killed, and the machine lose its power, at any time: what was committed last is
there. (The second rests on a disk that keeps the order which fdatasync asks for.)
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from colossax.errors import DamagedStoreError, OffloadError
from colossax.offload.disk.blocks import CommitBlock, FileBlock
from colossax.offload.disk.epochs import commits, holds, read_record, write_record
from colossax.offload.disk.file import BlockFile, aligned_buffer
from colossax.offload.disk.header import matching_file_block, padded, places_of
from colossax.offload.disk.layout import BLOCK_BYTES, RecordLayout, in_blocks
from colossax.offload.disk.pipeline import RING, run_ring
from colossax.offload.disk.slots import SlotBuffer

Arrays = dict[str, np.ndarray]

UNFINISHED = ".unfinished"
"""Ends the name of a file that is being created, or was by a process that was killed."""


class RecordStore:
    """Records of one file, each the arrays of one layer, under two epochs.

    One thread at a time may call it. Every process needs a file of its own.

    Attributes:
        path: The file.
        layout, records, owner, tail_bytes: As `create` was told.
        bytes: Disk bytes in all, taken when the file was created.
    """

    def __init__(self, file: BlockFile, block: FileBlock, layout: RecordLayout) -> None:
        """Use `create` or `open`."""
        self._file, self.tail_bytes = file, block.tail_bytes
        self.path, self.records, self.layout = file.path, block.records, layout
        self.owner = block.owner
        self._places = places_of(block, layout)
        self.bytes = self._places.end
        self._ring: list[SlotBuffer] = []
        self._written: dict[int, int] = {}
        self._updating = False
        self._epoch: int | None = None

    @classmethod
    def create(
        cls,
        path: Path | str,
        layout: RecordLayout,
        records: int,
        *,
        tail_bytes: int = 1 << 20,
        owner: str = "",
        direct: bool = True,
    ) -> "RecordStore":
        """Create a file and take all the disk space it will ever need.

        A file that appears is complete: until then it is called `<path>.unfinished`.

        Args:
            path: In an existing folder.
            layout: Arrays of a record.
            records: How many.
            tail_bytes: Largest tail that `commit` will be given.
            owner: Whose it is.
            direct: Whether to try to go past the page cache.

        Raises:
            OffloadError: It exists, cannot be written, or the disk has not the bytes; nothing is
                left behind.
        """
        path, block = Path(path), FileBlock(records, tail_bytes, layout.rows(), owner)
        if records < 1:
            raise OffloadError(
                f"disk store '{path}' was asked for {records} records; give 1 or more"
            )
        file = BlockFile(path.with_name(path.name + UNFINISHED), create=True, direct=direct)
        try:
            if path.exists():
                raise OffloadError(
                    f"disk store '{path}' exists already; open it, delete it or choose another name"
                )
            store = cls(file, block, layout)
            file.allocate(store.bytes)
            file.write(padded(block.to_bytes()), 0)
            file.sync()
            file.rename(path)
        except BaseException:
            file.path.unlink(missing_ok=True)
            file.close()
            raise
        store.path = path
        return store

    @classmethod
    def open(
        cls, path: Path | str, layout: RecordLayout, records: int, *, direct: bool = True
    ) -> "RecordStore":
        """Open a file that `create` made for the same layout and number of records.

        Raises:
            OffloadError: It is missing, in use, or made for something else; the message names the
                first difference.
            DamagedStoreError: It is cut short, or its first block is damaged.
        """
        file = BlockFile(Path(path), create=False, direct=direct)
        try:
            block = matching_file_block(file, layout, records)
            store = cls(file, block, layout.in_order_of(block.rows))
            if file.size_bytes < store.bytes:
                raise DamagedStoreError(
                    f"disk store '{path}' has {file.size_bytes} of its {store.bytes} bytes; delete "
                    "it and restore from the last checkpoint",
                    path=str(path),
                )
            store._epoch = store.consistent_epoch()
        except BaseException:
            file.close()
            raise
        return store

    @property
    def direct(self) -> bool:
        """Whether reads and writes go past the page cache (O_DIRECT)."""
        return self._file.direct

    @property
    def memory_bytes(self) -> int:
        """Host bytes that updates hold, from the first one until the store is closed."""
        return RING * self._places.slot_bytes

    def consistent_epoch(self) -> int | None:
        """Newest committed epoch that every record is of, as the disk now has it; None if none.

        The checksums of the arrays are compared when they are read (`read`, `update`, `verify`).
        Cost: one read of 4 KiB per record, and the tails.
        """
        for commit in commits(self._file, self._places):
            valid = (holds(self._file, self._places, i, commit.epoch) for i in range(self.records))
            if all(valid):
                return commit.epoch
        return None

    def tails(self) -> dict[int, bytes]:
        """What was given with the consistent epoch, and with the one before it if still there.

        Raises:
            OffloadError: There is no consistent epoch.
        """
        newest, found = self._require_epoch(), commits(self._file, self._places)
        return {commit.epoch: commit.tail for commit in found if commit.epoch <= newest}

    def read(self, record: int, epoch: int | None = None) -> Arrays:
        """The arrays of one record, in memory of their own.

        Args:
            record: Its index.
            epoch: Of which epoch; the consistent one by default.

        Raises:
            DamagedStoreError: They are not what was written.
            OffloadError: There is no consistent epoch, or the disk cannot be read.
        """
        epoch = self._require_epoch() if epoch is None else epoch
        self._check_record(record)
        buffer = SlotBuffer(self.layout)
        read_record(self._file, self._places, record, epoch, buffer)
        return buffer.arrays

    def read_array(self, record: int, name: str) -> np.ndarray:
        """One array of one record of the consistent epoch, its checksum not compared: `verify`.

        Raises:
            OffloadError: There is no consistent epoch, or the disk cannot be read.
        """
        epoch = self._require_epoch()
        self._check_record(record)
        shape, dtype = self.layout.arrays[name]
        if not math.prod(shape):
            return np.empty(shape, dtype)
        buffer = aligned_buffer(in_blocks(math.prod(shape) * dtype.itemsize))
        start = self._places.slot(record, epoch) + BLOCK_BYTES + self.layout.offsets()[name]
        self._file.read(buffer, start)
        return np.ndarray(shape, dtype, buffer=buffer.data)

    def verify(self) -> int | None:
        """Read all of the newest committed epoch and compare checksums; return that epoch.

        Raises:
            DamagedStoreError: A record is not what was written; it names the first.
        """
        newest = next(iter(commits(self._file, self._places)), None)
        if newest is None:
            return None
        buffer = SlotBuffer(self.layout)
        for record in range(self.records):
            read_record(self._file, self._places, record, newest.epoch, buffer)
        return newest.epoch

    def fill(self, record: int, arrays: Mapping[str, Any], epoch: int) -> None:
        """Write one record of a new epoch, as when state is initialised or restored.

        Args:
            record: Its index.
            arrays: Exactly those of the layout.
            epoch: One that leaves the consistent epoch whole: newer and of the other parity.

        Raises:
            OffloadError: It does not, the arrays do not fit, or the disk refuses.
        """
        self._check_idle()
        self._check_record(record)
        self._check_new(epoch)
        buffer = self._buffers(1)[0]
        buffer.offer(record, arrays)
        buffer.settle()
        self._write(record, epoch, buffer)

    def commit(self, epoch: int, tail: bytes | Iterable[np.ndarray] = b"") -> None:
        """Make an epoch the consistent one, once all its records are on the disk.

        Args:
            epoch: One whose records were all written, by `fill` or `update`.
            tail: What belongs to the epoch and is in no record, such as step and random key;
                arrays one after another are its bytes, too.

        Raises:
            OffloadError: Records are missing, the tail has no room, or the disk refuses; the
                consistent epoch is what it was.
        """
        self._check_idle()
        self._check_new(epoch)
        missing = [i for i in range(self.records) if self._written.get(i) != epoch]
        if missing:
            raise OffloadError(
                f"disk store '{self.path}' cannot commit epoch {epoch}: {len(missing)} of "
                f"{self.records} records were not written, the first is {missing[0]}; fill or "
                "update them all"
            )
        block = aligned_buffer(CommitBlock.room_bytes(self.tail_bytes))
        parts = (np.frombuffer(tail, np.uint8),) if isinstance(tail, bytes) else tail
        try:
            taken = CommitBlock.fill(block, epoch, parts, self.tail_bytes)
        except BufferError as error:
            raise OffloadError(
                f"disk store '{self.path}' has room for a tail of {self.tail_bytes} bytes, given "
                f"{error}; create it with more tail_bytes"
            ) from None
        written, self._written = self._written, {}  # after a failed sync all must be written again
        self._file.sync()
        self._written = written
        self._file.write(block[:taken], self._places.commit(epoch))
        self._file.sync()
        self._epoch = epoch

    def reset(self) -> None:
        """Forget every epoch, so that any may be filled next, as from a checkpoint.

        Raises:
            OffloadError: The disk refuses.
        """
        self._check_idle()
        self._epoch = None
        self._written = {}
        for parity in (0, 1):
            self._file.write(aligned_buffer(BLOCK_BYTES), self._places.commit(parity))
        self._file.sync()

    def update(
        self,
        epoch: int,
        fn: Callable[[int, Arrays], Mapping[str, Any]],
        order: Sequence[int] | None = None,
    ) -> None:
        """Write epoch + 1 of every record, computed from this one; `commit` it afterwards.

        A thread reads the records to come and another writes those done, while `fn` computes.

        Args:
            epoch: The consistent epoch.
            fn: Called in this thread with a record's index and its arrays, which lie in a buffer of
                the pass: it may change them in place, and must not keep them. Returns the new
                arrays, any of them those it was given. JAX arrays are waited for in the writing
                thread, so that `fn` may return before the device is done.
            order: Every record once; first to last by default.

        Raises:
            DamagedStoreError: A record is not what was written.
            OffloadError: Another epoch is consistent, results do not fit the layout, or the disk
                refuses. In every case, and where `fn` raises, this epoch stays as it is, and the
                update may be tried again.

        Cost: reads and writes every record once, and keeps `memory_bytes` of the host.
        """
        self._check_idle()
        order = range(self.records) if order is None else order
        self._check_update(epoch, order)
        ring = self._buffers(RING)

        def read(record: int, turn: int) -> None:
            read_record(self._file, self._places, record, epoch, ring[turn])

        def compute(record: int, turn: int) -> None:
            ring[turn].offer(record, fn(record, dict(ring[turn].arrays)))

        def write(record: int, turn: int) -> None:
            ring[turn].settle()
            self._write(record, epoch + 1, ring[turn])

        self._updating, self._written = True, {}
        try:
            run_ring(order, read=read, compute=compute, write=write)
        finally:
            self._updating = False
            for buffer in ring:
                buffer.drop()

    def _check_update(self, epoch: int, order: Sequence[int]) -> None:
        if epoch != self._epoch:
            raise OffloadError(
                f"disk store '{self.path}' cannot update epoch {epoch}: its consistent epoch is "
                f"{self._epoch}; commit or restore the one before updating it"
            )
        if sorted(order) != list(range(self.records)):
            raise OffloadError(
                f"the order of an update of disk store '{self.path}' is {list(order)}; give each "
                f"of its {self.records} records once"
            )

    def _check_new(self, epoch: int) -> None:
        current = self._epoch
        if epoch < 0 or (current is not None and (epoch <= current or (epoch - current) % 2 == 0)):
            raise OffloadError(
                f"disk store '{self.path}' cannot write epoch {epoch} while epoch {current} is its "
                f"consistent one; write {0 if current is None else current + 1}, or reset the store"
            )

    def _check_record(self, record: int) -> None:
        if not 0 <= record < self.records:
            raise OffloadError(
                f"disk store '{self.path}' has no record {record}; it has 0 to {self.records - 1}"
            )

    def _check_idle(self) -> None:
        if self._updating:
            raise OffloadError(
                f"disk store '{self.path}' is being updated; call it when update has returned"
            )

    def _require_epoch(self) -> int:
        if self._epoch is None:
            raise OffloadError(
                f"disk store '{self.path}' holds no whole epoch; fill it from a checkpoint"
            )
        return self._epoch

    def _buffers(self, count: int) -> list[SlotBuffer]:
        """The first buffers of the ring, made when first needed."""
        while len(self._ring) < count:
            self._ring.append(SlotBuffer(self.layout))
        return self._ring[:count]

    def _write(self, record: int, epoch: int, buffer: SlotBuffer) -> None:
        self._written.pop(record, None)
        write_record(self._file, self._places, record, epoch, buffer)
        self._written[record] = epoch

    def close(self) -> None:
        """Close the file and let go of the buffers; again is nothing.

        Raises:
            OffloadError: An update is under way.
        """
        self._check_idle()
        self._ring.clear()
        self._file.close()

    def __enter__(self) -> "RecordStore":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
