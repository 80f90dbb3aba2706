"""The first blocks of a store's file: what it was made for, and where its parts lie.

block 0...       FileBlock: records, arrays, largest tail
2 commit areas   CommitBlock of even epochs, of odd epochs
slots of even    record 0, record 1, ...: a RecordBlock, then the arrays, each from a block on
slots of odd     the same
"""

import numpy as np

from colossax.errors import DamagedStoreError, OffloadError
from colossax.offload.disk.blocks import VERSION, FileBlock
from colossax.offload.disk.file import BlockFile, aligned_buffer
from colossax.offload.disk.layout import BLOCK_BYTES, RecordLayout, in_blocks
from colossax.offload.disk.slots import Places


def disk_bytes(
    layout: RecordLayout, records: int, *, tail_bytes: int = 1 << 20, owner: str = ""
) -> int:
    """Bytes of the file that `RecordStore.create` would make: two epochs of every record."""
    return places_of(FileBlock(records, tail_bytes, layout.rows(), owner), layout).end


def places_of(block: FileBlock, layout: RecordLayout) -> Places:
    """Where the parts of a file with this header lie."""
    return Places.of(len(block.to_bytes()), block.records, block.tail_bytes, layout)


def matching_file_block(file: BlockFile, layout: RecordLayout, records: int) -> FileBlock:
    """The first blocks of a file that was made for this layout and number of records.

    Raises:
        OffloadError: It was made for something else; the message names the first difference.
        DamagedStoreError: A byte of them changed.
    """
    block = _file_block(file)
    difference = layout.difference(block.rows)
    if block.records != records:
        difference = f"it has {block.records} records, {records} were asked for"
    if difference:
        raise OffloadError(
            f"disk store '{file.path}' was made for another state: {difference}; delete it and "
            "restore from a checkpoint"
        )
    return block


def _file_block(file: BlockFile) -> FileBlock:
    """The first blocks of a store's file.

    Raises:
        OffloadError: It is no store, or one of another version.
        DamagedStoreError: A byte of it changed.
    """
    damaged = DamagedStoreError(
        f"the first block of disk store '{file.path}' is damaged; delete it and restore from the "
        "last checkpoint",
        path=str(file.path),
    )
    if file.size_bytes < BLOCK_BYTES:
        raise damaged
    try:
        size_bytes = FileBlock.size_bytes(_first(file, BLOCK_BYTES))
    except NotImplementedError as error:
        raise OffloadError(
            f"disk store '{file.path}' is of version {error}, this colossax reads version "
            f"{VERSION}; delete it and restore from a checkpoint"
        ) from error
    if size_bytes is None:
        raise OffloadError(f"'{file.path}' is not a disk store; choose another name")
    block = (
        FileBlock.from_bytes(_first(file, size_bytes)) if size_bytes <= file.size_bytes else None
    )
    if block is None:
        raise damaged
    return block


def _first(file: BlockFile, size_bytes: int) -> bytes:
    buffer = aligned_buffer(size_bytes)
    file.read(buffer, 0)
    return buffer.tobytes()


def padded(data: bytes) -> np.ndarray:
    """Bytes in a buffer that a disk can be given, zeros to the next whole block."""
    buffer = aligned_buffer(in_blocks(len(data)))
    buffer[: len(data)] = np.frombuffer(data, np.uint8)
    return buffer
