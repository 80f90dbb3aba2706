"""Rows against a plain reading of the same documents, and what must not change them."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossax.data import Rows, Split, SyntheticRows, WholeDocuments, stack_rows
from colossax.data import rows as rows_module
from colossax.data.hashing import _GOLDEN, _mixed, keyed_permutation, keyed_uint64

# Documents lie apart from one another and out of order, as in a split.
_GAP = 3


def _split(lengths):
    starts = np.cumsum([_GAP, *(length + _GAP for length in lengths[:-1])])
    tokens = np.full(starts[-1] + lengths[-1] + _GAP, 999, np.uint16)
    for start, length in zip(starts, lengths, strict=True):
        tokens[start : start + length] = np.arange(start, start + length)
    return Split(tokens=tokens, starts=starts, lengths=np.array(lengths))


def _documents(split):
    spans = zip(split.starts.tolist(), split.lengths.tolist(), strict=True)
    return [list(range(start, start + length)) for start, length in spans]


def _plain_row(stream, seq_len, row):
    """The row by one loop over `(token, next token of the document or None)`."""
    out = {name: [] for name in ("tokens", "targets", "segments", "positions", "weights")}
    segment = position = 0
    for token, following in stream[row * seq_len : (row + 1) * seq_len]:
        out["tokens"].append(token)
        out["targets"].append(token if following is None else following)
        out["segments"].append(segment)
        out["positions"].append(position)
        out["weights"].append(0 if following is None else 1)
        position += 1
        if following is None:
            segment, position = segment + 1, 0
    return out


def _stream(split, order):
    documents = _documents(split)
    return [
        (token, following)
        for document in (documents[i] for i in order)
        for token, following in zip(document, [*document[1:], None], strict=True)
    ]


lengths_of_documents = st.lists(st.integers(1, 9), min_size=1, max_size=12)


@pytest.mark.catches("target-beyond-document")
@given(lengths_of_documents, st.integers(1, 12), st.integers(0, 99))
def test_rows_equal_a_plain_reading_of_the_epochs(lengths, seq_len, seed):
    split = _split(lengths)
    rows = Rows(split, seq_len=seq_len, seed=seed)
    orders = [keyed_permutation(seed, epoch, count=len(lengths)) for epoch in range(3)]
    stream = [pair for order in orders for pair in _stream(split, order)]
    for row in range(len(stream) // seq_len):
        got = {name: array.tolist() for name, array in rows[row].items()}
        assert got == _plain_row(stream, seq_len, row)


@given(lengths_of_documents, st.integers(1, 12), st.integers(0, 99))
def test_every_epoch_has_every_document_once_and_whole(lengths, seq_len, seed):
    split = _split(lengths)
    rows, total = Rows(split, seq_len=seq_len, seed=seed), sum(lengths)
    count = -(-3 * total // seq_len)
    tokens = np.concatenate([rows[row]["tokens"] for row in range(count)]).tolist()
    for epoch in range(3):
        rest = tokens[epoch * total : (epoch + 1) * total]
        documents = sorted(_documents(split))
        while rest:
            document = next(d for d in documents if d[0] == rest[0])
            assert rest[: len(document)] == document
            documents.remove(document)
            rest = rest[len(document) :]
        assert documents == []


@given(lengths_of_documents, st.integers(1, 12), st.integers(0, 99))
def test_within_a_segment_the_target_is_the_next_token(lengths, seq_len, seed):
    rows = Rows(_split(lengths), seq_len=seq_len, seed=seed)
    for number in range(5):
        row, after = rows[number], rows[number + 1]
        tokens = [*row["tokens"], after["tokens"][0]]
        ends = np.flatnonzero(row["weights"] == 0)
        for i in range(seq_len):
            assert row["targets"][i] == (tokens[i] if i in ends else tokens[i + 1])
        changes = np.flatnonzero(np.diff(row["segments"]))
        assert set(changes) == set(ends[ends < seq_len - 1])
        starts = np.concatenate([[0], changes + 1])
        assert set(np.flatnonzero(row["positions"] == 0)) == set(starts)
        assert (np.diff(row["segments"]) >= 0).all() and row["segments"][0] == 0


def test_types_and_shapes():
    row = Rows(_split([4, 5]), seq_len=7, seed=0)[0]
    assert {name: (a.shape, a.dtype.name) for name, a in row.items()} == {
        "tokens": ((7,), "int32"),
        "targets": ((7,), "int32"),
        "segments": ((7,), "int32"),
        "positions": ((7,), "int32"),
        "weights": ((7,), "float32"),
    }


def test_a_row_does_not_depend_on_which_were_read_before():
    split = _split([5, 3, 8, 1, 2])
    rows = Rows(split, seq_len=6, seed=4)
    forward = [rows[row] for row in range(40)]
    for row in (39, 0, 17, 17, 3, 38):
        np.testing.assert_equal(rows[row], forward[row])
        np.testing.assert_equal(Rows(split, seq_len=6, seed=4)[row], forward[row])


def test_threads_read_what_one_reads():
    split = _split([7, 3, 8, 1, 2] * 20)
    rows = Rows(split, seq_len=50, seed=4)
    expected = [Rows(split, seq_len=50, seed=4)[row] for row in range(60)]
    wrong = []

    def read(first):
        for row in range(first, 60, 3):
            if any((rows[row][name] != value).any() for name, value in expected[row].items()):
                wrong.append(row)

    threads = [threading.Thread(target=read, args=(first,)) for first in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_an_epoch_is_ordered_once(monkeypatch):
    made = []

    def counted(*key, count):
        made.append(key)
        return keyed_permutation(*key, count=count)

    monkeypatch.setattr(rows_module, "keyed_permutation", counted)
    rows = Rows(_split([10] * 10), seq_len=30, seed=1)
    for row in range(10):
        rows[row]
    assert made == [(1, 0), (1, 1), (1, 2)]


@pytest.mark.catches("order-without-epoch")
def test_seeds_and_epochs_have_orders_of_their_own():
    split = _split([1] * 50)
    orders = {
        tuple(Rows(split, seq_len=50, seed=seed)[epoch]["tokens"].tolist())
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(orders) == 16
    assert all(sorted(order) == sorted(split.starts) for order in orders)


def test_rows_far_along_need_no_earlier_ones():
    rows = Rows(_split([5, 3, 8]), seq_len=7, seed=0)
    far = rows[10**15]
    assert far["tokens"].shape == (7,) and far["tokens"].max() < 999


@given(lengths_of_documents, st.integers(1, 12))
def test_after_the_last_epoch_weights_are_0(lengths, seq_len):
    split = _split(lengths)
    endless = Rows(split, seq_len=seq_len, seed=0)
    once = Rows(split, seq_len=seq_len, seed=0, epochs=1)
    total = sum(lengths)
    for number in range(-(-2 * total // seq_len)):
        row, full = once[number], endless[number]
        at = np.arange(number * seq_len, (number + 1) * seq_len)
        expected = np.where(at < total, full["weights"], 0)
        np.testing.assert_array_equal(row.pop("weights"), expected)
        full.pop("weights")
        np.testing.assert_equal(row, full)


@pytest.mark.catches("last-token-weighs")
def test_the_last_token_of_the_file_needs_none_after_it():
    tokens = np.arange(6, dtype=np.uint16)
    split = Split(tokens=tokens, starts=np.array([0]), lengths=np.array([6]))
    row = Rows(split, seq_len=6, seed=0)[0]
    assert row["targets"].tolist() == [1, 2, 3, 4, 5, 5]
    assert row["weights"].tolist() == [1, 1, 1, 1, 1, 0]


def test_stacked_rows_are_the_rows():
    rows = Rows(_split([4, 5]), seq_len=3, seed=0)
    stacked = stack_rows(rows, [4, 0])
    assert stacked["tokens"].shape == (2, 3)
    np.testing.assert_equal({n: a[0] for n, a in stacked.items()}, rows[4])
    np.testing.assert_equal({n: a[1] for n, a in stacked.items()}, rows[0])


# Hashing: the constants below are SplitMix64's published outputs for state 1234567.


def test_the_generator_is_splitmix64():
    state = np.uint64(1234567) + np.arange(1, 4, dtype=np.uint64) * np.uint64(_GOLDEN)
    assert _mixed(state).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_orders_are_the_same_everywhere():
    # A run resumed elsewhere must find its rows: these numbers may never change.
    assert keyed_uint64(0, 0, count=2).tolist() == [2558736989570252433, 17913671590881668180]
    assert keyed_permutation(7, 3, count=10).tolist() == [7, 2, 0, 9, 5, 3, 4, 8, 6, 1]


@pytest.mark.parametrize("count", [1, 2, 1000])
def test_permutations_are_permutations(count):
    assert sorted(keyed_permutation(5, 5, count=count)) == list(range(count))


# Random tokens


def test_synthetic_rows_are_a_function_of_seed_and_row():
    rows = SyntheticRows(vocab_size=11, seq_len=4000, seed=3)
    row = rows[5]
    np.testing.assert_equal(SyntheticRows(vocab_size=11, seq_len=4000, seed=3)[5], row)
    assert (rows[6]["tokens"] != row["tokens"]).any()
    assert (SyntheticRows(vocab_size=11, seq_len=4000, seed=4)[5]["tokens"] != row["tokens"]).any()
    assert np.bincount(row["tokens"]).min() > 250 and row["tokens"].max() == 10
    np.testing.assert_array_equal(row["targets"][:-1], row["tokens"][1:])
    assert {n: a.dtype.name for n, a in row.items()} == {
        **dict.fromkeys(("tokens", "targets", "segments", "positions"), "int32"),
        "weights": "float32",
    }


def _plain_whole(document, seq_len):
    """A document's row by one loop."""
    out = {name: [] for name in ("tokens", "targets", "segments", "positions", "weights")}
    for place in range(seq_len):
        inside, last = place < len(document), place >= len(document) - 1
        out["tokens"].append(document[min(place, len(document) - 1)])
        out["targets"].append(document[-1] if last else document[place + 1])
        out["segments"].append(0 if inside else 1)
        out["positions"].append(place if inside else place - len(document))
        out["weights"].append(0 if last else 1)
    return out


@pytest.mark.catches("whole-documents-learn-their-filling")
@given(lengths_of_documents, st.integers(1, 12), st.integers(0, 99))
def test_whole_documents_equal_a_plain_reading(lengths, seq_len, seed):
    split = _split(lengths)
    documents, rows = _documents(split), WholeDocuments(split, seq_len=seq_len, seed=seed, epochs=2)
    for epoch in range(3):
        order = keyed_permutation(seed, epoch, count=len(lengths))
        for at, document in enumerate(order):
            got = {name: a.tolist() for name, a in rows[epoch * len(lengths) + at].items()}
            want = _plain_whole(documents[document], seq_len)
            if epoch == 2:
                want["weights"] = [0] * seq_len
            assert got == want
    assert {name: a.dtype.name for name, a in rows[0].items()} == {
        name: "float32" if name == "weights" else "int32" for name in rows[0]
    }
