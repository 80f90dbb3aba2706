"""What a store's file holds of an epoch, as the disk has it."""

import numpy as np

from colossax.errors import DamagedStoreError
from colossax.offload.disk.blocks import CommitBlock, RecordBlock
from colossax.offload.disk.checksum import checksum
from colossax.offload.disk.file import BlockFile, aligned_buffer
from colossax.offload.disk.layout import BLOCK_BYTES
from colossax.offload.disk.slots import Places, SlotBuffer


def commits(file: BlockFile, places: Places) -> list[CommitBlock]:
    """The commits on the disk, newest first."""
    blocks = []
    for parity in (0, 1):
        area = aligned_buffer(places.commit_bytes)
        file.read(area, places.commit(parity))
        blocks.append(CommitBlock.from_bytes(area.tobytes()))
    return sorted((c for c in blocks if c is not None), key=lambda c: c.epoch, reverse=True)


def holds(file: BlockFile, places: Places, record: int, epoch: int) -> bool:
    """Whether a record lies there by its header; its arrays are not looked at."""
    block = aligned_buffer(BLOCK_BYTES)
    file.read(block, places.slot(record, epoch))
    header = RecordBlock.from_bytes(block.tobytes())
    return header is not None and (header.record, header.epoch) == (record, epoch)


def read_record(
    file: BlockFile, places: Places, record: int, epoch: int, buffer: SlotBuffer
) -> None:
    """Read a record into a buffer.

    Raises:
        DamagedStoreError: It is not what was written.
    """
    file.read(buffer.slot, places.slot(record, epoch))
    header = RecordBlock.from_bytes(buffer.slot[:BLOCK_BYTES].tobytes())
    if header is None:
        what = "its header is damaged or was never written"
    elif (header.record, header.epoch) != (record, epoch):
        what = f"record {header.record} of epoch {header.epoch} lies there"
    elif header.payload_bytes != len(buffer.payload):
        what = f"it has {header.payload_bytes} bytes, not {len(buffer.payload)}"
    elif header.checksum != checksum(buffer.payload):
        what = "the checksum of its arrays is wrong"
    else:
        return
    raise DamagedStoreError(
        f"record {record} of epoch {epoch} in disk store '{file.path}' cannot be used: {what}; "
        "restore from the last checkpoint",
        path=str(file.path),
        record=record,
        epoch=epoch,
    )


def write_record(
    file: BlockFile, places: Places, record: int, epoch: int, buffer: SlotBuffer
) -> None:
    """Write a buffer's arrays as a record."""
    block = RecordBlock(record, epoch, len(buffer.payload), checksum(buffer.payload))
    buffer.slot[:BLOCK_BYTES] = np.frombuffer(block.to_bytes(), np.uint8)
    file.write(buffer.slot, places.slot(record, epoch))
