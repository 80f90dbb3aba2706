"""Every flipped byte of what describes the file is seen."""

import numpy as np
import pytest

from colossax.offload.disk.blocks import CommitBlock, FileBlock, RecordBlock
from colossax.offload.disk.layout import BLOCK_BYTES

BLOCKS = [
    FileBlock(3, 100, [["a", [2, 3], "bfloat16"], ["ä", [], "float32"]]),
    RecordBlock(2, 7, 8192, b"12345678"),
    CommitBlock(9, b"tail"),
    CommitBlock(0, b""),
]


def written(block):
    """Its bytes in the file."""
    if not isinstance(block, CommitBlock):
        return block.to_bytes()
    room = np.zeros(CommitBlock.room_bytes(len(block.tail)), np.uint8)
    parts = np.array_split(np.frombuffer(block.tail, np.uint8), 3)
    taken = CommitBlock.fill(room, block.epoch, parts, len(block.tail))
    return room[:taken].tobytes()


@pytest.mark.parametrize("block", BLOCKS, ids=repr)
def test_round_trip_and_every_flipped_byte(block):
    data = written(block)
    assert len(data) % BLOCK_BYTES == 0
    assert type(block).from_bytes(data) == block
    used = len(data.rstrip(b"\0"))
    for place in range(used):
        damaged = bytearray(data)
        damaged[place] ^= 0x10
        if isinstance(block, FileBlock) and place < 12:
            continue  # the magic and the version; tests/offload/disk/test_faults.py
        assert type(block).from_bytes(bytes(damaged)) is None, place


def test_zeros_and_one_kind_for_another_are_nothing():
    for kind in (RecordBlock, CommitBlock):
        assert kind.from_bytes(bytes(BLOCK_BYTES)) is None
    assert RecordBlock.from_bytes(written(BLOCKS[2])) is None
    assert CommitBlock.from_bytes(BLOCKS[1].to_bytes()) is None
    assert FileBlock.size_bytes(BLOCKS[1].to_bytes()) is None


def test_a_tail_has_the_room_that_was_kept_for_it():
    for tail_bytes in (0, 1, 4068, 4069, 4070, 10_000):
        data = written(CommitBlock(1, bytes(tail_bytes)))
        assert len(data) == CommitBlock.room_bytes(tail_bytes)


def test_a_tail_is_the_bytes_of_its_arrays():
    arrays = [np.arange(6, dtype=np.int32).reshape(2, 3), np.array(0.5, np.float32), np.zeros(0)]
    room = np.zeros(BLOCK_BYTES, np.uint8)
    taken = CommitBlock.fill(room, 4, iter(arrays), 28)
    found = CommitBlock.from_bytes(room[:taken].tobytes())
    assert found == CommitBlock(4, b"".join(array.tobytes() for array in arrays))
    with pytest.raises(BufferError, match="28"):
        CommitBlock.fill(room, 4, arrays, 27)


def test_a_large_description_takes_several_blocks():
    block = FileBlock(1, 1, [[f"array {n}", [n], "float32"] for n in range(500)])
    data = block.to_bytes()
    assert FileBlock.size_bytes(data[:BLOCK_BYTES]) == len(data) > 2 * BLOCK_BYTES
    assert FileBlock.from_bytes(data) == block
