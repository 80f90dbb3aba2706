"""Records, epochs and commits; every refusal."""

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colossax.errors import OffloadError
from colossax.offload.disk import RecordLayout, RecordStore, disk_bytes
from tests.offload.disk.support import (
    LAYOUT,
    RECORDS,
    advance,
    assert_epoch,
    new_store,
    open_store,
    same,
    step,
    tail_of,
    truth,
)


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def store(tmp_path, request):
    """A store at epoch 0."""
    with new_store(tmp_path / "store", direct=request.param) as found:
        yield found


def test_epochs_come_back_bit_for_bit(store):
    assert_epoch(store, 0)
    for epoch in range(5):
        order = None if epoch % 2 else range(RECORDS - 1, -1, -1)
        step(store, epoch, order=order)
        assert_epoch(store, epoch + 1)
    assert store.verify() == 5
    store.close()
    with open_store(store.path) as again:
        assert_epoch(again, 5)
        step(again, 5)
        assert_epoch(again, 6)


def test_the_order_is_kept(store):
    seen, order = [], [3, 0, 4, 1, 2]
    store.update(0, lambda i, a: seen.append(i) or advance(i, a), order)
    assert seen == order


def test_disk_and_host_bytes_are_what_they_were_said_to_be(store):
    size = store.path.stat()
    assert store.bytes == disk_bytes(LAYOUT, RECORDS, tail_bytes=64) == size.st_size
    assert size.st_blocks * 512 >= store.bytes, "the space is not taken"
    assert store.memory_bytes == 4 * (4096 + LAYOUT.payload_bytes)
    step(store, 0)
    assert store.path.stat().st_size == store.bytes


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 40), max_size=3).map(tuple),
            st.sampled_from([np.dtype("f4"), np.dtype("i1"), np.dtype(ml_dtypes.bfloat16)]),
        ),
        max_size=5,
    ),
    st.integers(1, 4),
    st.integers(0, 2**32),
)
def test_any_layout_keeps_its_bits(tmp_path, specs, records, seed):
    layout = RecordLayout({f"a{n}": spec for n, spec in enumerate(specs)})
    random = np.random.default_rng(seed)

    def noise():
        made = {}
        for name, (shape, dtype) in layout.arrays.items():
            size = int(np.prod(shape)) * dtype.itemsize
            made[name] = np.frombuffer(random.bytes(size), dtype).reshape(shape)
        return made

    path = tmp_path / "any"
    path.unlink(missing_ok=True)
    with RecordStore.create(path, layout, records) as store:
        first, second = ([noise() for _ in range(records)] for _ in range(2))
        for record, arrays in enumerate(first):
            store.fill(record, arrays, 0)
        store.commit(0)
        assert all(same(store.read(i), arrays) for i, arrays in enumerate(first))
        store.update(0, lambda i, arrays: second[i] if same(arrays, first[i]) else {})
        store.commit(1)
        assert all(same(store.read(i), arrays) for i, arrays in enumerate(second))


def test_arrays_begin_on_pages_and_zero_size_is_no_trouble(store):
    def fn(record, arrays):
        assert all(a.ctypes.data % 4096 == 0 for a in arrays.values() if a.size)
        return advance(record, arrays)

    store.update(0, fn)


def test_results_may_lie_anywhere_even_in_each_others_place(tmp_path):
    layout = RecordLayout({name: ((1000,), np.dtype("f4")) for name in "abc"})
    with RecordStore.create(tmp_path / "swap", layout, 3) as store:
        for record in range(3):
            store.fill(record, {n: np.full(1000, k, "f4") for k, n in enumerate("abc")}, 0)
        store.commit(0)
        store.update(0, lambda i, x: {"a": x["b"], "b": x["c"], "c": x["a"]})
        store.commit(1)
        for record in range(3):
            assert {n: x[0] for n, x in store.read(record).items()} == {"a": 1, "b": 2, "c": 0}


def test_results_may_be_one_array_used_again_each_time(store):
    """NumPy results are taken before the function is called again."""
    reused = {name: np.empty(*spec) for name, spec in LAYOUT.arrays.items()}

    def fn(record, arrays):
        for name, array in truth(record, 1).items():
            reused[name][...] = array
        return reused

    store.update(0, fn)
    store.commit(1, tail_of(1))
    assert_epoch(store, 1)


def test_jax_results_are_waited_for_in_the_writing_thread(store):
    """Beside NumPy results, which change meanwhile, and computed from arrays of the buffer."""
    waits = jax.jit(lambda x, record: x * 3 + record)
    count = np.empty((3, 5), np.float32)

    def fn(record, arrays):
        count[...] = arrays["count"] + 1
        x = waits(arrays["x"], np.uint32(record))
        rest = truth(record, 1)
        return {**rest, "x": x, "count": count}

    store.update(0, fn)
    store.commit(1, tail_of(1))
    assert_epoch(store, 1)


@pytest.mark.catches("epochs-in-one-place")
def test_an_epoch_that_was_not_committed_is_not_there(store):
    store.update(0, advance)
    assert_epoch(store, 0)
    store.close()
    with open_store(store.path) as again:
        assert_epoch(again, 0)
        with pytest.raises(OffloadError, match="cannot commit epoch 1: 5 of 5 records were not"):
            again.commit(1)
        step(again, 0)
        assert_epoch(again, 1)


def test_a_restored_epoch_takes_the_place_of_a_later_one_only_after_a_reset(store):
    for epoch in range(3):
        step(store, epoch)
    for epoch in (1, 2, 3, 5):
        with pytest.raises(OffloadError, match=f"cannot write epoch {epoch} while epoch 3 is"):
            store.fill(0, truth(0, epoch), epoch)
    assert_epoch(store, 3)
    store.reset()
    assert store.consistent_epoch() is None
    for record in range(RECORDS):
        store.fill(record, truth(record, 1), 1)
    assert store.consistent_epoch() is None
    store.commit(1, tail_of(1))
    assert_epoch(store, 1)
    store.close()
    with open_store(store.path) as again:
        assert_epoch(again, 1)


def test_a_later_epoch_may_be_filled_over_an_older_one(store):
    for record in range(RECORDS):
        store.fill(record, truth(record, 7), 7)
        assert store.consistent_epoch() == 0
    store.commit(7, tail_of(7))
    assert_epoch(store, 7)


@pytest.mark.catches("commit-without-records")
def test_a_failed_update_does_not_help_the_next_to_be_complete(store):
    """What one update wrote and did not commit is not mixed with another's records."""
    store.update(0, lambda i, a: {**a, "x": np.zeros_like(a["x"])})

    def fails(record, arrays):
        if record == 3:
            raise RuntimeError("mine")
        return advance(record, arrays)

    with pytest.raises(RuntimeError, match="^mine$"):
        store.update(0, fails)
    with pytest.raises(OffloadError, match="[2-5] of 5 records were not written"):
        store.commit(1)
    assert_epoch(store, 0)
    step(store, 0)
    assert_epoch(store, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": None}, "given for record 0 lacks array 'x'; give exactly"),
        ({"y": np.zeros(1)}, "given for record 0 has a foreign array 'y'"),
        ({"x": np.zeros(1500, "f4")}, r"'x' .* is float32\[1500\], .* says uint32\[1500\]; cast"),
        ({"x": np.zeros(1499, "u4")}, r"'x' .* is uint32\[1499\], the layout says uint32\[1500\]"),
    ],
)
def test_results_that_do_not_fit_are_refused(store, change, message):
    def fn(record, arrays):
        return {n: a for n, a in {**arrays, **change}.items() if a is not None}

    with pytest.raises(OffloadError, match=message):
        store.update(0, fn)
    with pytest.raises(OffloadError, match=message):
        store.fill(0, fn(0, truth(0, 1)), 1)
    assert_epoch(store, 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.update(1, advance), "cannot update epoch 1: its consistent epoch is 0"),
        (lambda s: s.update(0, advance, [0, 1, 2, 3]), r"order .* is \[0, 1, 2, 3\]; give each of"),
        (lambda s: s.update(0, advance, [0, 1, 2, 3, 3]), "give each of its 5 records once"),
        (lambda s: s.fill(5, truth(0, 1), 1), "has no record 5; it has 0 to 4"),
        (lambda s: s.fill(-1, truth(0, 1), 1), "has no record -1"),
        (lambda s: s.read(5), "has no record 5"),
        (
            lambda s: s.commit(0),
            "cannot write epoch 0 while epoch 0 is its consistent one; write 1",
        ),
        (lambda s: s.commit(1), "cannot commit epoch 1: 5 of 5 records"),
        (lambda s: step(s, 0) or s.commit(2, bytes(65)), "2: 5 of 5 records"),
        (lambda s: s.update(0, advance) or s.commit(1, bytes(65)), "tail of 64 bytes, given 65"),
    ],
)
def test_wrong_calls_are_refused(store, call, message):
    with pytest.raises(OffloadError, match=message):
        call(store)


def test_calls_from_within_an_update_are_refused(store):
    calls = [
        lambda: store.update(0, advance),
        lambda: store.fill(0, truth(0, 1), 1),
        lambda: store.commit(1),
        store.reset,
        store.close,
    ]

    def fn(record, arrays):
        for call in calls:
            with pytest.raises(OffloadError, match="is being updated; call it when update has"):
                call()
        return advance(record, arrays)

    step(store, 0, fn)
    assert_epoch(store, 1)


def test_an_empty_store_says_so(tmp_path):
    with RecordStore.create(tmp_path / "empty", LAYOUT, 2) as store:
        assert (store.consistent_epoch(), store.verify()) == (None, None)
        for call in (store.tails, lambda: store.read(0)):
            with pytest.raises(
                OffloadError, match="holds no whole epoch; fill it from a checkpoint"
            ):
                call()
        with pytest.raises(
            OffloadError, match="cannot update epoch 0: its consistent epoch is None"
        ):
            store.update(0, advance)
