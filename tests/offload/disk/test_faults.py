"""Disks that are full, slow, read-only, broken or lie; files that are not what they should be."""

import errno
import fcntl
import os
import resource
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from colossax.errors import DamagedStoreError, OffloadError
from colossax.offload.disk import RecordLayout, RecordStore
from colossax.offload.disk.layout import BLOCK_BYTES
from tests.offload.disk.support import (
    LAYOUT,
    RECORDS,
    advance,
    assert_epoch,
    new_store,
    open_store,
    step,
    truth,
)


@pytest.fixture
def store(tmp_path):
    """A store at epoch 1, whose epoch 0 is whole too."""
    with new_store(tmp_path / "store") as found:
        step(found, 0)
        yield found


def fail(monkeypatch, name, number, *, after=0, times=10**9):
    """Let a call of the system fail with an error number, the first so many times excepted."""
    real, calls = getattr(os, name), []

    def call(*args, **kwargs):
        calls.append(args)
        if after < len(calls) <= after + times:
            raise OSError(number, os.strerror(number))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, name, call)
    return calls


def flip(path, place, bit=0x04):
    """Change one byte of a file."""
    with open(path, "r+b") as file:
        file.seek(place)
        old = file.read(1)[0]
        file.seek(place)
        file.write(bytes([old ^ bit]))


FAULTS = {
    errno.ENOSPC: r"cannot be written \(No space left on device\); make room or choose",
    errno.EROFS: r"cannot be written \(Read-only file system\); mount the filesystem for writing",
    errno.EIO: r"cannot be written \(Input/output error\); check the disk",
    errno.EDQUOT: r"cannot be written \(Disk quota exceeded\); make room within the quota",
    errno.EFBIG: r"cannot be written \(File too large\); raise the limit of file sizes",
    errno.ENODEV: r"cannot be written \(No such device\); check the disk",
}


@pytest.mark.parametrize("number", FAULTS)
@pytest.mark.parametrize("after", [0, 3])
def test_a_write_that_fails_leaves_the_epoch_and_may_be_tried_again(
    store, monkeypatch, number, after
):
    before = set(threading.enumerate())
    with monkeypatch.context() as patch:
        fail(patch, "pwritev", number, after=after)
        with pytest.raises(OffloadError, match=FAULTS[number]) as caught:
            step(store, 1)
    assert str(store.path) in str(caught.value)
    assert not isinstance(caught.value, DamagedStoreError)
    assert set(threading.enumerate()) == before
    assert_epoch(store, 1)
    store.close()
    with open_store(store.path) as again:
        assert_epoch(again, 1)
        step(again, 1)
        assert_epoch(again, 2)


def test_a_read_that_fails_ends_the_update(store, monkeypatch):
    with monkeypatch.context() as patch:
        fail(patch, "preadv", errno.EIO, after=2)
        with pytest.raises(OffloadError, match=r"cannot be read \(Input/output error\); check the"):
            store.update(1, advance)
    assert_epoch(store, 1)


@pytest.mark.parametrize("sync", [0, 1], ids=["before the commit", "after it"])
def test_after_a_failed_sync_nothing_counts_as_written(store, monkeypatch, sync):
    store.update(1, advance)
    with monkeypatch.context() as patch:
        fail(patch, "fdatasync", errno.EIO, after=sync, times=1)
        with pytest.raises(OffloadError, match=r"cannot be written \(Input/output error\)"):
            store.commit(2)
        if not sync:
            with pytest.raises(OffloadError, match="cannot commit epoch 2: 5 of 5 records"):
                store.commit(2)
    if not sync:
        assert_epoch(store, 1)


def test_a_slow_disk_is_only_slow(store, monkeypatch):
    for name in ("preadv", "pwritev"):
        real = getattr(os, name)

        def slow(*args, real=real):
            time.sleep(0.05)
            return real(*args)

        monkeypatch.setattr(os, name, slow)
    step(store, 1)
    assert_epoch(store, 2)


def test_short_reads_and_writes_are_continued(store, monkeypatch):
    """The system may move less than it was asked to."""
    for name in ("preadv", "pwritev"):
        real = getattr(os, name)

        def short(fd, buffers, offset, real=real):
            return real(fd, [memoryview(buffers[0])[:BLOCK_BYTES]], offset)

        monkeypatch.setattr(os, name, short)
    step(store, 1)
    assert_epoch(store, 2)


def test_too_small_a_disk_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    huge = RecordLayout({"x": ((1 << 44,), np.dtype("f4"))})
    allocated = fail(monkeypatch, "posix_fallocate", errno.EIO)
    message = r"'.*store\.unfinished' needs \d{15} bytes and its filesystem has \d+ free; make room"
    with pytest.raises(OffloadError, match=message):
        RecordStore.create(tmp_path / "store", huge, 3)
    assert not allocated
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG])
def test_a_disk_that_gives_no_space_leaves_no_file(tmp_path, monkeypatch, number):
    fail(monkeypatch, "posix_fallocate", number)
    with pytest.raises(OffloadError, match=r"cannot be given \d+ bytes \(.*\); (make room|raise)"):
        new_store(tmp_path / "store")
    assert not list(tmp_path.iterdir())


def test_the_systems_own_limit_of_file_sizes(tmp_path):
    """A real refusal, not a simulated one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, hard))
    try:
        with pytest.raises(
            OffloadError, match=r"\(File too large\); raise the limit of file sizes"
        ):
            new_store(tmp_path / "store")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.EROFS, r"cannot be opened \(Read-only file system\); mount the filesystem"),
        (errno.EACCES, r"cannot be opened \(Permission denied\); grant the right to write"),
    ],
)
def test_a_folder_that_may_not_be_written(store, monkeypatch, number, message):
    store.close()
    fail(monkeypatch, "open", number)
    with pytest.raises(OffloadError, match=message):
        new_store(store.path.with_name("other"))
    with pytest.raises(OffloadError, match=message):
        open_store(store.path)


def test_missing_folders_and_files(tmp_path):
    with pytest.raises(
        OffloadError, match=r"cannot be opened \(No such file or directory\); create"
    ):
        new_store(tmp_path / "no" / "store")
    with pytest.raises(
        OffloadError, match=r"cannot be opened \(No such file or directory\); create"
    ):
        open_store(tmp_path / "store")


@pytest.mark.catches("store-names-its-record")
@pytest.mark.catches("record-checksum")
@pytest.mark.parametrize("record", range(RECORDS))
@pytest.mark.parametrize("place", [BLOCK_BYTES, BLOCK_BYTES + 5999, BLOCK_BYTES + 8192 + 59])
def test_a_flipped_byte_of_an_array_is_named(store, record, place):
    flip(store.path, store._places.slot(record, 1) + place)
    message = (
        f"record {record} of epoch 1 in disk store '{store.path}' cannot be used: the checksum"
    )
    calls = [lambda: store.read(record), store.verify, lambda: store.update(1, advance)]
    for call in calls:
        with pytest.raises(DamagedStoreError, match=message) as caught:
            call()
        error = caught.value
        assert (error.path, error.record, error.epoch) == (str(store.path), record, 1)
        assert "restore from the last checkpoint" in str(error)
    for other in range(RECORDS):
        if other != record:
            store.read(other)


@pytest.mark.parametrize("place", [0, 9, 13, 21, 29, 37, 45])
def test_a_flipped_byte_of_a_header(store, place):
    flip(store.path, store._places.slot(2, 1) + place)
    with pytest.raises(DamagedStoreError, match="record 2 of epoch 1 .* its header is damaged"):
        store.verify()
    assert store.consistent_epoch() == 0  # nothing was written over it yet
    with pytest.raises(DamagedStoreError, match="record 2 of epoch 1 .* its header is damaged"):
        store.update(1, advance)
    store.close()
    with open_store(store.path) as again:
        assert again.consistent_epoch() is None


def test_no_whole_epoch_is_left_when_the_other_was_written_over(store):
    store.update(1, advance)
    flip(store.path, store._places.slot(2, 1))
    store.close()
    with open_store(store.path) as again:
        assert again.consistent_epoch() is None
        with pytest.raises(DamagedStoreError, match="record 2 of epoch 1") as caught:
            again.verify()
        assert caught.value.record == 2
        for record in range(RECORDS):  # what a caller does then
            again.fill(record, truth(record, 0), 0)
        again.commit(0, b"tail of epoch 0")
        assert_epoch(again, 0)


def test_a_record_in_anothers_place(store):
    """A write that went astray carries right checksums."""
    slot, size = store._places.slot, store._places.slot_bytes
    with open(store.path, "r+b") as file:
        file.seek(slot(1, 1))
        moved = file.read(size)
        file.seek(slot(3, 1))
        file.write(moved)
    with pytest.raises(DamagedStoreError, match="record 3 .* record 1 of epoch 1 lies there"):
        store.verify()


def test_a_lost_write_leaves_a_record_of_an_older_epoch(store):
    slot, size = store._places.slot, store._places.slot_bytes
    with open(store.path, "r+b") as file:
        file.seek(slot(4, 0))
        old = file.read(size)
        step(store, 1)
        file.seek(slot(4, 0))
        file.write(old)
    with pytest.raises(DamagedStoreError, match="record 4 .* record 4 of epoch 0 lies there"):
        store.verify()
    assert store.consistent_epoch() == 1


@pytest.mark.parametrize("place", [0, 8, 12, 20, 28, 40, 46])
def test_a_flipped_byte_of_a_commit(store, place):
    """The epoch before is taken where it is whole, none where it is not."""
    flip(store.path, store._places.commit(1) + place)
    assert store.consistent_epoch() == 0
    store.update(1, advance)
    assert store.consistent_epoch() is None


def test_a_damaged_first_block(store):
    store.close()
    flip(store.path, 30)
    with pytest.raises(DamagedStoreError, match="first block of disk store .* is damaged; delete"):
        open_store(store.path)
    flip(store.path, 30)
    flip(store.path, 8)
    with pytest.raises(
        OffloadError, match="is of version 5, this colossax reads version 1; delete"
    ):
        open_store(store.path)
    flip(store.path, 8)
    flip(store.path, 0)
    with pytest.raises(OffloadError, match="is not a disk store; choose another name"):
        open_store(store.path)


@pytest.mark.parametrize("keep", [0.9, 0.3, 0.0])
def test_a_file_cut_short(store, keep):
    size = int(store.bytes * keep)
    store.close()
    os.truncate(store.path, size)
    message = f"has {size} of its {store.bytes} bytes" if size else "first block .* is damaged"
    with pytest.raises(DamagedStoreError, match=message):
        open_store(store.path)


def test_a_file_cut_short_while_open(store):
    os.truncate(store.path, store._places.slot(2, 1))
    with pytest.raises(
        DamagedStoreError, match=r"ends at byte \d+, before \d+ which belongs to it"
    ):
        store.update(1, advance)


def test_a_file_of_another_state_is_refused(store):
    store.close()
    with pytest.raises(
        OffloadError, match="it has 5 records, 6 were asked for; delete it and rest"
    ):
        RecordStore.open(store.path, LAYOUT, 6)
    other = RecordLayout({**LAYOUT.arrays, "x": ((7,), np.dtype("u4"))})
    with pytest.raises(
        OffloadError, match=r"another state: array 'x' is uint32\[1500\] in the file"
    ):
        RecordStore.open(store.path, other, RECORDS)
    turned = RecordLayout(dict(reversed(LAYOUT.arrays.items())))
    with RecordStore.open(store.path, turned, RECORDS) as same:
        assert_epoch(same, 1)


def test_an_existing_file_is_not_written_over(store):
    with pytest.raises(OffloadError, match="exists already; open it, delete it or choose another"):
        new_store(store.path)
    assert_epoch(store, 1)
    assert [path.name for path in store.path.parent.iterdir()] == ["store"]


def test_what_a_killed_creation_left_is_replaced(tmp_path):
    (tmp_path / "store.unfinished").write_bytes(b"rest" * 10_000_000)
    with new_store(tmp_path / "store") as store:
        assert_epoch(store, 0)
        assert [path.name for path in tmp_path.iterdir()] == ["store"]
        assert store.path.stat().st_size == store.bytes


def test_no_records_are_refused(tmp_path):
    with pytest.raises(OffloadError, match="was asked for 0 records; give 1 or more"):
        RecordStore.create(tmp_path / "store", LAYOUT, 0)
    assert not list(tmp_path.iterdir())


@pytest.mark.catches("two-processes-one-store")
def test_one_process_at_a_time(store):
    program = (
        "import sys\n"
        "from tests.offload.disk.support import open_store\n"
        "try:\n    open_store(sys.argv[1])\n"
        "except ValueError as error:\n    print(error)\n"
    )
    run = [sys.executable, "-c", program, str(store.path)]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    assert done.stdout == (
        f"disk store '{store.path}' is open in another process; wait until that ends or give each "
        "process a file of its own\n"
    )
    store.close()
    assert not subprocess.run(run, capture_output=True, text=True, check=True).stdout
    with open_store(store.path) as again:
        assert_epoch(again, 1)


def test_several_stores_at_once(tmp_path):
    stores = [new_store(tmp_path / f"process{n}", epoch=n) for n in range(3)]
    for epoch, store in enumerate(stores):
        step(store, epoch)
    for epoch, store in enumerate(stores):
        assert_epoch(store, epoch + 1)
        store.close()


@pytest.mark.parametrize("at", ["fcntl", "preadv"])
def test_without_o_direct_files_are_buffered(tmp_path, monkeypatch, at):
    """Some filesystems refuse the flag, some the first read; either is seen and told."""
    real_fcntl, real_preadv = fcntl.fcntl, os.preadv

    def refuse_flag(fd, command, *args):
        if command == fcntl.F_SETFL and args[0] & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_fcntl(fd, command, *args)

    def refuse_read(fd, *args):
        if real_fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_preadv(fd, *args)

    if at == "fcntl":
        monkeypatch.setattr(fcntl, "fcntl", refuse_flag)
    else:
        monkeypatch.setattr(os, "preadv", refuse_read)
    advised = fail(monkeypatch, "posix_fadvise", 0, times=0)
    with new_store(tmp_path / "store") as store:
        assert not store.direct
        step(store, 0)
        assert_epoch(store, 1)
    assert advised, "what was read and written stays in the page cache"


def test_where_o_direct_works_it_is_in_force(store):
    """Asked of the system, not of the store."""
    probe = os.open(store.path, os.O_RDONLY | os.O_DIRECT)
    try:
        flags = fcntl.fcntl(store._file._fd, fcntl.F_GETFL)
    finally:
        os.close(probe)
    assert store.direct
    assert flags & os.O_DIRECT
