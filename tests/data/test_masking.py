"""Masked rows: what is masked, how often, and what it depends on."""

import numpy as np
import pytest

from colossax.data import MaskedRows, Rows, Split, SyntheticRows, ValidationBatches, WholeDocuments

MASK, VOCAB, LENGTH = 1000, 900, 512
LENGTHS = (40, 7, 300, 90, 1, 64)


def text():
    """Documents whose tokens are all different, and none of them any of `[0, VOCAB)`."""
    starts = np.cumsum([0, *LENGTHS[:-1]])
    tokens = np.arange(sum(LENGTHS)).astype(np.uint16) + 2000
    return Split(tokens=tokens, starts=starts, lengths=np.array(LENGTHS))


def masked(rows, seed=0, **shares):
    return MaskedRows(rows, mask=MASK, vocab=VOCAB, seed=seed, **shares)


def plain(seq_len=LENGTH):
    return SyntheticRows(vocab_size=VOCAB, seq_len=seq_len, seed=1)


def fates(rate, random, kept, rows=200):
    """Of tokens, how many are told, and of those how many are masks, as they were, and others."""
    source = plain()
    made = masked(source, rate=rate, random=random, kept=kept)
    told = masks = same = 0
    for number in range(rows):
        row, was = made[number], source[number]["tokens"]
        at = row["weights"] > 0
        assert (row["targets"] == was).all()
        assert (row["tokens"][~at] == was[~at]).all()
        told += at.sum()
        masks += (row["tokens"][at] == MASK).sum()
        same += (row["tokens"][at] == was[at]).sum()
    return np.array([told, masks, same, told - masks - same]), rows * LENGTH


@pytest.mark.catches("all-told-are-masks")
@pytest.mark.parametrize(("rate", "random", "kept"), [(0.15, 0.1, 0.1), (0.3, 0.25, 0.05)])
def test_shares_are_those_asked_for(rate, random, kept):
    """Within five standard deviations; a token drawn at random is itself now and then."""
    found, count = fates(rate, random, kept)
    itself = random / VOCAB
    told = np.array([1, 1 - random - kept, kept + itself, random - itself])
    want = rate * told
    assert (np.abs(found / count - want) < 5 * np.sqrt(want * (1 - want) / count)).all()


def test_all_may_be_masks():
    found, _ = fates(0.15, 0.0, 0.0, rows=20)
    assert found[1] == found[0] and found[2] == found[3] == 0


def test_what_is_drawn_is_any_token():
    drawn = []
    made = masked(plain(), rate=0.5, random=1.0, kept=0.0)
    for number in range(60):
        row = made[number]
        drawn.append(row["tokens"][row["weights"] > 0])
    counts = np.bincount(np.concatenate(drawn), minlength=VOCAB)
    assert len(counts) == VOCAB and counts.min() > 0
    mean = counts.mean()
    assert counts.std() == pytest.approx(np.sqrt(mean), rel=0.2), "as of even draws"


@pytest.mark.catches("ends-are-masked")
@pytest.mark.parametrize("source", [Rows, WholeDocuments])
def test_ends_of_documents_and_what_fills_rows_are_never_masked(source):
    split = text()
    ends = split.tokens[split.starts + split.lengths - 1]
    rows = source(split, seq_len=32, seed=3)
    made = masked(rows, rate=0.9)
    for number in range(40):
        row, was = made[number], rows[number]
        at = row["weights"] > 0
        assert not (at & (was["weights"] == 0)).any()
        assert not np.isin(row["targets"][at], ends).any()
        for name in ("segments", "positions"):
            assert (row[name] == was[name]).all()
    assert {name: x.dtype.name for name, x in row.items()} == {
        name: x.dtype.name for name, x in was.items()
    }


@pytest.mark.catches("same-mask-in-each-row")
def test_a_row_depends_on_its_number_and_the_seed_alone():
    made = masked(plain())
    forward = [made[number] for number in range(20)]
    for number in (19, 3, 3, 0):
        np.testing.assert_equal(masked(plain())[number], forward[number])
    hidden = [row["weights"].tobytes() for row in forward]
    assert len(set(hidden)) == len(hidden)
    assert masked(plain(), seed=1)[0]["weights"].tobytes() != hidden[0]


def test_another_epoch_masks_others():
    """The text of one document again and again: each row is an epoch."""
    split = Split(tokens=np.arange(64), starts=np.array([0]), lengths=np.array([64]))
    made = masked(Rows(split, seq_len=64, seed=0), rate=0.3)
    assert (made[0]["targets"] == made[1]["targets"]).all()
    assert (made[0]["weights"] != made[1]["weights"]).any()


def test_held_out_tokens_are_masked_alike_each_time_and_count_once():
    split = text()
    sizes = {"seq_len": 32, "global_batch": 4, "wanted": range(4), "batches": 9}

    def batches():
        return list(ValidationBatches(split, view=lambda rows, seed: masked(rows, seed), **sizes))

    np.testing.assert_equal(batches(), batches())
    seen = np.concatenate([b["targets"][b["weights"] > 0] for b in batches()])
    assert len(seen) == len(set(seen.tolist())) > 0
