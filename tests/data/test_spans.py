"""Rows some of whose spans are left out: what is read, what is written, and what both depend on."""

import numpy as np
import pytest

from colossax.data import SpanRows, SyntheticRows
from colossax.errors import InputError
from colossax.tasks import SpanConfig

VOCAB, LAST, START, END = 900, 1999, 7, 8


def pairs(seq_len=128, *, told=19, spans=6, seed=0, rows=None):
    rows = SyntheticRows(vocab_size=VOCAB, seq_len=seq_len, seed=1) if rows is None else rows
    given = {"start": START, "end": END, "last": LAST}
    return SpanRows(rows, told=told, spans=spans, seed=seed, **given)


def put_together(row):
    """The text again: each sentinel of the source gives way to what is written behind it."""
    written, spans = row["targets"].tolist(), {}
    assert written.pop() == END
    for token in written:
        if token > LAST - 100:
            spans[token] = []
        else:
            spans[next(reversed(spans))].append(token)
    source = row["source"].tolist()
    assert source.pop() == END
    whole, met = [], []
    for token in source:
        whole += spans.get(token, [token])
        met += [token] if token in spans else []
    assert met == list(spans) == [LAST - at for at in range(len(spans))]
    assert all(spans.values())
    return whole, spans


@pytest.mark.catches("sentinels-count-up")
@pytest.mark.catches("spans-beside-one-another")
@pytest.mark.parametrize(("seq_len", "told", "spans"), [(128, 19, 6), (9, 4, 4), (9, 4, 1)])
def test_what_is_read_and_what_is_written_make_the_row(seq_len, told, spans):
    source = SyntheticRows(vocab_size=VOCAB, seq_len=seq_len, seed=1)
    made = pairs(seq_len, told=told, spans=spans, rows=source)
    for number in range(20):
        row = made[number]
        whole, found = put_together(row)
        assert whole == source[number]["tokens"].tolist()
        assert len(found) == spans and sum(map(len, found.values())) == told
        assert (np.diff(np.flatnonzero(row["source"] > LAST - 100)) > 1).all()
        assert row["tokens"].tolist() == [START, *row["targets"][:-1].tolist()]
        assert {name: len(x) for name, x in row.items()} == {
            "source": seq_len - told + spans + 1,
            **dict.fromkeys(("tokens", "targets", "weights"), told + spans + 1),
        }


def test_weights_are_those_of_the_row():
    """What a row fills up with, and what ends a document, is written without weight."""

    class Ends:
        seq_len = 64

        def __getitem__(self, row):
            tokens = np.arange(64, dtype=np.int32)
            return {"tokens": tokens, "weights": (tokens % 5 > 0).astype(np.float32)}

    row = pairs(64, told=20, spans=5, rows=Ends())[0]
    targets, weights = row["targets"][:-1], row["weights"][:-1]
    text = targets < 64
    assert (weights[text] == (targets[text] % 5 > 0)).all()
    behind = np.flatnonzero(~text) + 1
    assert (weights[~text] == weights[behind]).all()
    assert row["weights"][-1] == 1


@pytest.mark.catches("spans-of-all-rows-alike")
def test_rows_differ_and_are_what_they_were():
    one, other, seeded = pairs(), pairs(), pairs(seed=1)
    places = {tuple(one[number]["source"].tolist()) for number in range(50)}
    assert len(places) == 50
    holes = [np.flatnonzero(one[number]["source"] > LAST - 100).tolist() for number in range(20)]
    assert len({tuple(at) for at in holes}) == 20
    assert all((one[3][name] == other[3][name]).all() for name in one[3])
    assert (one[3]["source"] != seeded[3]["source"]).any()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rate": 1.0}, "data.spans.rate: found 1.0; give a share above 0, below 1"),
        ({"length": 0.0}, "data.spans.length: found 0"),
    ],
)
def test_numbers_out_of_bounds_are_refused(given, message):
    with pytest.raises(InputError, match=message):
        SpanConfig(**given)


def test_lengths():
    assert SpanConfig().lengths(512) == (512 - 77 + 26 + 1, 77 + 26 + 1)
    with pytest.raises(InputError, match="9 of the 10 tokens of a row, in 3 spans, leave no token"):
        SpanConfig(rate=0.9).counts(10)
