"""Whatever the moment at which a process dies, an epoch is whole: the one committed last.

SIGKILL ends a process, not the machine: what it had written is in the system's hands and arrives.
It tests the order in which things are written, not whether they are on the disk. What losing the
power does is played through on a log of writes and syncs: of what was written since the last
`fdatasync`, any block may be on the disk and any may not. That takes the disk at its word; one that
calls `fdatasync` done before it is cannot be tested here.
"""

import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from colossax.offload.disk.epochs import holds
from colossax.offload.disk.file import BlockFile
from colossax.offload.disk.layout import BLOCK_BYTES
from tests.offload.disk.support import (
    RECORDS,
    advance,
    assert_epoch,
    new_store,
    open_store,
    step,
    tail_of,
    truth,
)

KILLS = 50


@pytest.mark.slow
def test_killed_at_any_moment_the_last_committed_epoch_is_whole(tmp_path):
    path = tmp_path / "store"
    new_store(path).close()
    generator, middle, last = random.Random(0), 0, 0
    command = [sys.executable, "-m", "tests.offload.disk.children", str(path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as maker:
        for _ in range(KILLS):
            last, interrupted = kill_one(maker, path, last, generator)
            middle += interrupted
        maker.stdin.close()
    assert maker.returncode == 0
    assert last > KILLS, "too few epochs to tell"
    assert middle > KILLS // 5, "too few kills in the middle of an update to tell"


def kill_one(maker, path, last, generator):
    """Kill a child some writes later; the epoch then found, and whether one was half-written."""
    maker.stdin.write("go\n")
    maker.stdin.flush()
    opened, child = maker.stdout.readline().split()
    assert opened == "open"
    lines = [maker.stdout.readline() for _ in range(generator.randrange(5 * RECORDS))]
    time.sleep(generator.uniform(0, 0.002))
    os.kill(int(child), signal.SIGKILL)
    lines += iter(maker.stdout.readline, "dead\n")
    reported = max((int(line) for line in lines if line != "write\n"), default=last)
    with open_store(path) as store:
        found = store.consistent_epoch()
        assert found in (reported, reported + 1), f"{found} found, {reported} was reported"
        assert_epoch(store, found)
        begun = [holds(store._file, store._places, record, found + 1) for record in range(RECORDS)]
    return found, any(begun) and not all(begun)


class Log:
    """What a store writes, in order, and where it waits for the disk."""

    def __init__(self, monkeypatch, start):
        self.start, self.events = start, []
        write, sync = BlockFile.write, BlockFile.sync

        def logged_write(file, buffer, offset):
            self.events.append((offset, buffer.tobytes()))
            write(file, buffer, offset)

        def logged_sync(file):
            sync(file)
            self.events.append("sync")

        monkeypatch.setattr(BlockFile, "write", logged_write)
        monkeypatch.setattr(BlockFile, "sync", logged_sync)

    def after_power_loss(self, count, generator):
        """The file, had the power gone after so many events: unsynced blocks by chance."""
        events = self.events[:count]
        synced = max((n for n, event in enumerate(events) if event == "sync"), default=-1)
        kept = bytearray(self.start)
        share = generator.choice([0, 0.1, 0.5, 0.9, 1])
        for number, event in enumerate(events):
            if event == "sync":
                continue
            offset, data = event
            for place in range(0, len(data), BLOCK_BYTES):
                if number < synced or generator.random() < share:
                    kept[offset + place : offset + place + BLOCK_BYTES] = data[
                        place : place + BLOCK_BYTES
                    ]
        return bytes(kept)


@pytest.mark.sentinel
@pytest.mark.catches("commit-order")
def test_whatever_blocks_a_power_loss_takes_the_last_committed_epoch_is_whole(
    tmp_path, monkeypatch
):
    path, epochs = tmp_path / "store", 5
    store = new_store(path)
    log, committed = Log(monkeypatch, path.read_bytes()), {0: 0}
    for epoch in range(epochs):
        step(store, epoch)
        committed[len(log.events)] = epoch + 1
    store.close()
    monkeypatch.undo()
    check_all(log, committed, tmp_path / "lost", times=6)


def test_a_power_loss_while_a_checkpoint_is_restored_never_mixes_it_with_the_old_state(
    tmp_path, monkeypatch
):
    """Between the reset and the commit there is no epoch; a half-restored one never counts."""
    path = tmp_path / "store"
    store = new_store(path)
    step(store, 0)
    step(store, 1)
    log = Log(monkeypatch, path.read_bytes())
    store.reset()
    reset = len(log.events)
    for record in range(RECORDS):
        store.fill(record, truth(record, 1), 1)
    store.commit(1, tail_of(1))
    store.close()
    monkeypatch.undo()
    for count in range(reset, len(log.events)):
        generator = random.Random(count)
        for _ in range(10):
            path.write_bytes(log.after_power_loss(count, generator))
            with open_store(path) as found:
                assert found.consistent_epoch() in (None, 1)
                if found.consistent_epoch():
                    assert_epoch(found, 1)


def check_all(log, committed, path, times):
    """Lose the power after each event, several times."""
    least = 0
    for count in range(len(log.events) + 1):
        least = committed.get(count, least)
        generator = random.Random(count)
        for _ in range(times):
            path.write_bytes(log.after_power_loss(count, generator))
            with open_store(path) as store:
                found = store.consistent_epoch()
                assert found in (least, least + 1)
                assert_epoch(store, found)


def test_the_truth_is_what_the_updates_give():
    """The closed form beside plain repetition."""
    arrays = truth(3, 0)
    for epoch in range(1, 40):
        arrays = advance(3, arrays)
        wanted = truth(3, epoch)
        assert all(np.array_equal(arrays[name], wanted[name]) for name in wanted), epoch
