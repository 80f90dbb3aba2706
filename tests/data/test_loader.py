"""Batches: the same for any split over processes, resumable, prefetched, cleanly closed."""

import os
import socket
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from colossax.data import (
    BatchLoader,
    Rows,
    Split,
    SyntheticRows,
    ValidationBatches,
    global_arrays,
    stack_rows,
    wanted_rows,
)

SEQ_LEN, BATCH = 10, 8


def _split(count=9):
    lengths = np.arange(4, 4 + count)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    return Split(tokens=np.arange(lengths.sum()).astype(np.uint16), starts=starts, lengths=lengths)


@pytest.fixture
def rows():
    return Rows(_split(), seq_len=SEQ_LEN, seed=2)


def _take(loader, count):
    with loader:
        return [next(loader) for _ in range(count)]


def _mesh(**axes):
    shape = tuple(axes.values())
    return jax.make_mesh(shape, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_batch_g_is_its_rows(rows, threads):
    batches = _take(BatchLoader(rows, BATCH, wanted=range(BATCH), threads=threads), 6)
    for number, batch in enumerate(batches):
        expected = stack_rows(rows, range(number * BATCH, (number + 1) * BATCH))
        np.testing.assert_equal(batch, expected)


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("interleaved", [False, True])
def test_processes_together_make_the_batches_of_one(rows, processes, interleaved):
    whole = _take(BatchLoader(rows, BATCH, wanted=range(BATCH)), 4)
    numbers = np.arange(BATCH)
    shares = [
        numbers[p::processes] if interleaved else np.split(numbers, processes)[p]
        for p in range(processes)
    ]
    parts = [_take(BatchLoader(rows, BATCH, wanted=share.tolist()), 4) for share in shares]
    for number, batch in enumerate(whole):
        for name, expected in batch.items():
            got = np.empty_like(expected)
            for share, part in zip(shares, parts, strict=True):
                got[share] = part[number][name]
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("at", [0, 1, 5, 11])
def test_a_run_resumed_anywhere_goes_on_the_same(rows, threads, at):
    through = BatchLoader(rows, BATCH, wanted=range(BATCH), threads=threads)
    expected = _take(through, 14)
    first = BatchLoader(rows, BATCH, wanted=range(BATCH), threads=threads)
    _take(first, at)
    assert first.position == at
    # As after a restart with half the processes' rows in another order.
    wanted = [6, 1, 3]
    second = BatchLoader(rows, BATCH, wanted=wanted, start=first.position, threads=threads)
    assert second.position == at
    for number, batch in enumerate(_take(second, 14 - at), start=at):
        np.testing.assert_equal(batch, {n: a[wanted] for n, a in expected[number].items()})


class _Slow:
    """Rows that say when they are made."""

    seq_len = SEQ_LEN

    def __init__(self, rows):
        self.rows, self.made = rows, []

    def __getitem__(self, row):
        self.made.append((row, threading.current_thread().name))
        return self.rows[row]


def _until(condition):
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def test_batches_are_made_ahead_by_threads_and_do_not_count(rows):
    slow = _Slow(rows)
    with BatchLoader(slow, 2, wanted=[0, 1], start=10, threads=2, prefetch=3) as loader:
        next(loader)
        _until(lambda: len(slow.made) >= 8)
        assert loader.position == 11
        time.sleep(0.05)
        assert {row for row, _ in slow.made} == set(range(20, 28)), "one handed out, three ahead"
        assert all("grain" in thread for _, thread in slow.made)


def test_without_threads_nothing_is_made_ahead(rows):
    slow = _Slow(rows)
    _take(BatchLoader(slow, 2, wanted=[1], threads=0), 2)
    assert slow.made == [(1, "MainThread"), (3, "MainThread")]


def test_closing_ends_the_threads_and_the_batches(rows):
    def alive():
        return [thread for thread in threading.enumerate() if "grain" in thread.name]

    _until(lambda: not alive())
    loader = BatchLoader(rows, BATCH, wanted=[0])
    next(loader)
    assert alive()
    loader.close()
    loader.close()
    _until(lambda: not alive())
    with pytest.raises(ValueError, match="closed"):
        next(loader)


class _Broken:
    seq_len = SEQ_LEN

    def __getitem__(self, row):
        raise OSError("disk gone")


@pytest.mark.parametrize("threads", [0, 2])
def test_what_goes_wrong_in_a_thread_is_raised_where_the_batch_is_taken(threads):
    with BatchLoader(_Broken(), 2, wanted=[0], threads=threads) as loader:
        with pytest.raises(OSError, match="disk gone"):
            next(loader)
        assert loader.position == 0


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"wanted": [0, 8]}, r"wanted: found \[8\]; name rows of a batch of 8"),
        ({"wanted": [-1]}, r"wanted: found \[-1\]"),
        ({"wanted": []}, "wanted: found no rows"),
        ({"wanted": [0], "start": -1}, "start: found -1; batches are counted from 0"),
    ],
)
def test_rows_outside_the_batch_are_refused(rows, options, match):
    with pytest.raises(ValueError, match=match):
        BatchLoader(rows, BATCH, **options)


# Validation


def test_validation_batches_are_fixed_and_start_again(rows):
    split = _split(30)
    batches = ValidationBatches(split, seq_len=10, global_batch=4, wanted=range(4), batches=3)
    assert len(batches) == 3
    once, again = list(batches), list(batches)
    assert len(once) == 3
    np.testing.assert_equal(once, again)
    for share in ([0, 1], [3]):
        part = list(ValidationBatches(split, seq_len=10, global_batch=4, wanted=share, batches=3))
        for whole, local in zip(once, part, strict=True):
            np.testing.assert_equal(local, {n: a[share] for n, a in whole.items()})


@pytest.mark.parametrize("count", [1, 3, 9])
def test_a_small_held_out_split_counts_each_token_once(count):
    split = _split(count)
    batches = ValidationBatches(split, seq_len=10, global_batch=4, wanted=range(4), batches=50)
    assert len(batches) == -(-split.token_count // 40)
    targets = [t for b in batches for t in b["targets"][b["weights"] > 0].tolist()]
    spans = zip(split.starts, split.lengths, strict=True)
    assert sorted(targets) == sorted(t for s, n in spans for t in range(s + 1, s + n))
    assert all(batch["weights"].any() for batch in batches)


# Devices


def test_wanted_rows_are_those_of_the_devices(devices):
    mesh = _mesh(data=4, tensor=2)

    def rows_of(spec):
        return wanted_rows(NamedSharding(mesh, spec), (8, 10))

    assert rows_of(PartitionSpec("data")) == list(range(8))
    assert rows_of(PartitionSpec(None, "tensor")) == list(range(8))
    half = jax.sharding.Mesh(np.array(devices[:1]), ("data",))
    assert wanted_rows(NamedSharding(half, PartitionSpec("data")), (3, 10)) == [0, 1, 2]


@pytest.mark.parametrize(
    "spec",
    [
        PartitionSpec("data", "tensor"),
        PartitionSpec(("data", "tensor")),
        PartitionSpec(("tensor", "data")),
        PartitionSpec(None, ("tensor", "data")),
        PartitionSpec(),
    ],
    ids=str,
)
def test_global_arrays_hold_the_batch_on_any_layout(devices, spec):
    rows = SyntheticRows(vocab_size=100, seq_len=16, seed=0)
    wanted = [3, 0, 7, 5, 1, 2, 6, 4]
    local = stack_rows(rows, wanted)
    sharding = NamedSharding(_mesh(data=4, tensor=2), spec)
    made = global_arrays(local, wanted, dict.fromkeys(local, sharding), 8)
    expected = stack_rows(rows, range(8))
    assert made.keys() == expected.keys()
    for name, array in made.items():
        assert array.sharding == sharding and array.dtype == expected[name].dtype
        np.testing.assert_array_equal(np.asarray(array), expected[name])


def test_names_may_have_shardings_of_their_own(devices):
    mesh = _mesh(data=8)
    local = {"tokens": np.arange(8)[:, None] + np.zeros(3, int), "flags": np.arange(8)}
    shardings = {
        "tokens": NamedSharding(mesh, PartitionSpec("data")),
        "flags": NamedSharding(mesh, PartitionSpec()),
    }
    made = global_arrays(local, range(8), shardings, 8)
    assert {name: array.sharding for name, array in made.items()} == shardings
    assert made["flags"].tolist() == list(range(8))


def test_a_device_whose_row_was_not_made_is_refused(devices):
    sharding = NamedSharding(_mesh(data=8), PartitionSpec("data"))
    with pytest.raises(ValueError, match="tokens: a device here holds rows that were not made"):
        global_arrays({"tokens": np.zeros((4, 3))}, range(4), {"tokens": sharding}, 8)


PEER = """
import sys
import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from colossax.data import BatchLoader, SyntheticRows, global_arrays, stack_rows, wanted_rows

jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]))
mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
rows = SyntheticRows(vocab_size=100, seq_len=16, seed=0)
for spec, share in ((P("data"), 4), (P(None, "data"), 8), (P(("tensor", "data")), 4)):
    sharding = NamedSharding(mesh, spec)
    wanted = wanted_rows(sharding, (8, 16))
    assert len(wanted) == share, (spec, wanted)
    local = next(BatchLoader(rows, 8, wanted=wanted, start=3, threads=0))
    made = global_arrays(local, wanted, dict.fromkeys(local, sharding), 8)
    expected = stack_rows(rows, range(24, 32))
    for name, array in made.items():
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, expected[name][shard.index])
print("same")
"""


def test_two_processes_hold_the_batch_of_one():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    peers = [
        subprocess.Popen(
            [sys.executable, "-c", PEER, str(port), str(process)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    for peer in peers:
        out, err = peer.communicate(timeout=120)
        assert (peer.returncode, out) == (0, "same\n"), err


# Imports and exit

QUIET = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("grain", "tokenizers", "pyarrow"):
            raise ModuleNotFoundError(f"No module named '{name}'")

sys.meta_path.insert(0, Absent())
from colossax.data import BatchLoader, SyntheticRows, path_documents
loader = BatchLoader(SyntheticRows(vocab_size=9, seq_len=4, seed=0), 2, wanted=[0, 1], threads=0)
print(next(loader)["tokens"].shape)
"""

ABANDONED = """
from colossax.data import BatchLoader, SyntheticRows
loader = BatchLoader(SyntheticRows(vocab_size=9, seq_len=4, seed=0), 2, wanted=[0, 1])
print(next(loader)["tokens"].shape)
"""


@pytest.mark.parametrize("script", [QUIET, ABANDONED], ids=["bare", "abandoned"])
def test_it_runs_bare_and_ends_quietly_without_being_closed(script):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "(2, 4)\n", "")
