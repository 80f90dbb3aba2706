"""Small stores whose every epoch is known without running them."""

import ml_dtypes
import numpy as np

from colossax.offload.disk import RecordLayout, RecordStore

WORDS = 1500
RECORDS = 5
LAYOUT = RecordLayout(
    {
        "x": ((WORDS,), np.dtype(np.uint32)),
        "count": ((3, 5), np.dtype(np.float32)),
        "none": ((0, 4), np.dtype(np.float32)),
        "half": ((7,), np.dtype(ml_dtypes.bfloat16)),
        "scalar": ((), np.dtype(np.int64)),
    }
)


def truth(record, epoch):
    """Arrays of a record: x_e+1 = 3 x_e + record modulo 2**32, counts of epochs in the others."""
    power = pow(3, epoch, 2**33)
    start = np.arange(WORDS, dtype=np.uint64) + np.uint64(1000 * record)
    x = start * np.uint64(power % 2**32) + np.uint64(record * (power - 1) // 2 % 2**32)
    return {
        "x": (x % np.uint64(2**32)).astype(np.uint32),
        "count": np.full((3, 5), epoch + record, np.float32),
        "none": np.zeros((0, 4), np.float32),
        "half": np.full(7, epoch % 100, ml_dtypes.bfloat16),
        "scalar": np.asarray(epoch * 2**40 + record, np.int64),
    }


def advance(record, arrays):
    """One epoch further; some arrays in place, some new."""
    x, half = arrays["x"], arrays["half"]
    x *= np.uint32(3)
    x += np.uint32(record)
    arrays["count"] += 1
    epoch = int(arrays["scalar"]) // 2**40 + 1
    return {
        **arrays,
        "half": np.full(7, epoch % 100, half.dtype),
        "scalar": np.asarray(epoch * 2**40 + record, np.int64),
    }


def tail_of(epoch):
    """What is committed with an epoch."""
    return f"tail of epoch {epoch}".encode()


def new_store(path, *, epoch=0, records=RECORDS, **options):
    """A store with one committed epoch."""
    store = RecordStore.create(path, LAYOUT, records, tail_bytes=64, **options)
    for record in range(records):
        store.fill(record, truth(record, epoch), epoch)
    store.commit(epoch, tail_of(epoch))
    return store


def step(store, epoch, fn=advance, order=None):
    """Update and commit."""
    store.update(epoch, fn, order)
    store.commit(epoch + 1, tail_of(epoch + 1))


def open_store(path, **options):
    """Open what `new_store` made."""
    return RecordStore.open(path, LAYOUT, RECORDS, **options)


def same(arrays, wanted):
    """Whether all are equal bit for bit."""
    return arrays.keys() == wanted.keys() and all(
        (arrays[name].dtype, arrays[name].shape) == (array.dtype, array.shape)
        and arrays[name].tobytes() == array.tobytes()
        for name, array in wanted.items()
    )


def assert_epoch(store, epoch):
    """The store's consistent epoch is this one, whole and true."""
    assert store.consistent_epoch() == epoch
    assert store.tails()[epoch] == tail_of(epoch)
    for record in range(store.records):
        assert same(store.read(record), truth(record, epoch)), f"record {record} of {epoch}"
