"""Reading, computing and writing at the same time, over a ring of buffers."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

RING = 4
"""Buffers: two being read or waiting for their turn, one computed on, one being written."""

AHEAD = RING - 1
"""How many items are asked for beyond the one computed on; the last waits for a buffer."""


def run_ring(
    items: Sequence[int],
    *,
    read: Callable[[int, int], None],
    compute: Callable[[int, int], None],
    write: Callable[[int, int], None],
) -> None:
    """Read, compute and write each item, in order, each with one buffer of the ring.

    Every function is called with the item and the number of its buffer: `read` in a thread of its
    own, `write` in another, `compute` in the calling thread. A buffer is read into when what it
    held before is written. Nothing waits for a limited time: a slow disk is slow, no more.

    What any of them raises ends the pass and is raised here. Neither thread outlives the call; it
    waits for the one read and the one write that are under way, and leaves out those that are not.
    """
    with (
        ThreadPoolExecutor(1, "disk-read") as reader,
        ThreadPoolExecutor(1, "disk-write") as writer,
    ):
        try:
            reads: dict[int, Future[None]] = {}
            writes: dict[int, Future[None]] = {}

            def ask(turn: int) -> None:
                if turn < len(items):
                    args = (read, items[turn], turn % RING, writes.pop(turn - RING, None))
                    reads[turn] = reader.submit(_read_after, *args)

            for turn in range(AHEAD):
                ask(turn)
            for turn, item in enumerate(items):
                ask(turn + AHEAD)
                reads.pop(turn).result()
                compute(item, turn % RING)
                writes[turn] = writer.submit(write, item, turn % RING)
            for written in writes.values():
                written.result()
        except BaseException:
            for pool in (reader, writer):
                pool.shutdown(wait=False, cancel_futures=True)
            raise


def _read_after(
    read: Callable[[int, int], None], item: int, buffer: int, written: Future[None] | None
) -> None:
    if written is not None:
        written.result()
    read(item, buffer)
