"""Rows of whole examples: nothing leaks, nothing is lost, each row by its number."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossax.data.chats.encoding import Answers
from colossax.data.chats.rows import AnswerRows, JudgedRows, packed
from colossax.errors import DataError

TOLD = np.uint32(1 << 31)


def answers(lengths, of=1, good=None, prompts=None):
    """Documents of a prompt and an answer of these lengths; a token tells where it stood."""
    parts, offsets = [], [0]
    for number, (prompt, answer) in enumerate(lengths):
        tokens = np.arange(prompt + answer, dtype=np.uint32) + 100 * (number + 1)
        tokens[prompt:] |= TOLD
        parts.append(tokens)
        offsets.append(offsets[-1] + len(tokens))
    examples = len(lengths) // of
    return Answers(
        tokens=np.concatenate(parts),
        offsets=np.array(offsets, np.int64),
        hashes=np.arange(examples, dtype=np.uint64),
        good=np.zeros(examples, np.int8) if good is None else np.array(good, np.int8),
        prompts=np.arange(examples, dtype=np.uint64) if prompts is None else np.array(prompts),
        of=of,
        fingerprint="",
    )


def rows_of(made, *, kind=AnswerRows, seq_len=16, documents=4, examples=None, **how):
    examples = np.arange(len(made)) if examples is None else np.array(examples)
    return kind(made, examples, seq_len=seq_len, documents=documents, seed=0, **how)


def shown(row):
    """Documents of a row: tokens in order, targets that are told."""
    found = []
    for number in range(row["segments"].max() + 1):
        own = row["segments"] == number
        found.append(
            (row["tokens"][own].tolist(), row["targets"][own & (row["weights"] > 0)].tolist())
        )
    return found


LENGTHS = [(3, 2), (2, 6), (5, 1), (1, 3), (4, 4), (2, 2)]


def test_documents_are_whole_and_answers_alone_are_told():
    made = answers(LENGTHS)
    rows = rows_of(made)
    seen = [one for r in range(rows.count) for one in shown(rows[r])]
    wanted = []
    for number, (prompt, answer) in enumerate(LENGTHS):
        tokens = (np.arange(prompt + answer) + 100 * (number + 1)).tolist()
        wanted.append((tokens[:-1], tokens[prompt:]))
    assert sorted(seen) == sorted(wanted)
    for r in range(rows.count):
        row = rows[r]
        for number in range(row["segments"].max() + 1):
            at = row["positions"][row["segments"] == number]
            np.testing.assert_array_equal(at, np.arange(len(at)))
        assert not row["weights"][row["segments"] < 0].any()


@pytest.mark.catches("pairs-are-parted")
def test_a_pair_shares_a_row_the_chosen_first():
    made = answers([*LENGTHS, *LENGTHS], of=2)
    rows = rows_of(made, seq_len=24)
    for r in range(rows.count):
        found = [tokens[0] // 100 - 1 for tokens, _ in shown(rows[r])]
        assert len(found) % 2 == 0
        assert all(a % 2 == 0 and b == a + 1 for a, b in zip(found[::2], found[1::2], strict=True))


def test_each_epoch_has_all_rows_in_an_order_of_its_own():
    rows = rows_of(answers([(1, 10)] * 12), seq_len=12)
    epochs = [
        [int(rows.examples(e * rows.count + r)[0]) for r in range(rows.count)] for e in (0, 1)
    ]
    assert [sorted(one) for one in epochs] == [list(range(12))] * 2
    assert epochs[0] != epochs[1]
    again = rows_of(answers([(1, 10)] * 12), seq_len=12)
    assert [int(again.examples(r)[0]) for r in range(12)] == epochs[0]


def test_a_row_each():
    rows = rows_of(answers(LENGTHS), alone=True)
    assert rows.count == len(LENGTHS)
    assert all(len(shown(rows[r])) == 1 for r in range(rows.count))


def test_behind_its_epochs_nothing_counts():
    rows = rows_of(answers(LENGTHS), epochs=1)
    assert rows[rows.count - 1]["weights"].any()
    assert not rows[rows.count]["weights"].any()


def test_what_is_too_long_is_left_out():
    rows = rows_of(answers([(3, 2), (10, 10)]))
    assert rows.left_out.tolist() == [1]
    with pytest.raises(DataError, match="rows have 16 tokens, and the shortest example needs 19"):
        rows_of(answers([(10, 10), (12, 12)]))


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=60),
    st.integers(8, 32),
    st.integers(1, 5),
)
def test_packing(lengths, seq_len, most):
    rows, left_out = packed(lengths, seq_len=seq_len, most=most)
    assert sorted([at for row in rows for at in row] + left_out) == list(range(len(lengths)))
    for row in rows:
        assert 1 <= len(row) <= most
        assert sum(lengths[at] for at in row) <= seq_len
    assert all(lengths[at] > seq_len for at in left_out)
    # Any two rows that may take more are together longer than one.
    open_rows = [sum(lengths[at] for at in row) for row in rows if len(row) < most]
    sizes = [len(row) for row in rows if len(row) < most]
    for (one, first), (other, second) in itertools.combinations(
        zip(open_rows, sizes, strict=True), 2
    ):
        assert one + other > seq_len or first + second > most


@pytest.mark.catches("mismatched-with-its-own")
def test_judged_answers_come_with_other_answers():
    made = answers(LENGTHS, good=[1, 0, 0, 1, 1, 0])
    rows = rows_of(made, kind=JudgedRows)
    order = {}
    for r in range(rows.count):
        row, examples = rows[r], rows.examples(r)
        assert row["desirable"][: len(examples)].tolist() == made.good[examples].tolist()
        beside = {name.removeprefix("mismatched_"): x for name, x in row.items() if "mis" in name}
        for example, (tokens, told) in zip(examples, shown(beside), strict=False):
            prompt = LENGTHS[example][0]
            assert tokens[:prompt] == (np.arange(prompt) + 100 * (example + 1)).tolist()
            other = told[0] // 100 - 1
            assert other != example
            assert len(told) == LENGTHS[other][1]
            order[int(example)] = int(other)
    assert len(set(order.values())) == len(order) > 1


@pytest.mark.catches("mismatched-with-its-own")
def test_other_answers_are_to_other_prompts():
    """Of two prompts with three answers each no answer is taken for another of its own prompt."""
    prompts = [0, 0, 0, 1, 1, 1]
    rows = rows_of(answers(LENGTHS, good=[0] * 6, prompts=prompts), kind=JudgedRows)
    pairs = 0
    for r in range(3 * rows.count):
        row = rows[r]
        beside = {name.removeprefix("mismatched_"): x for name, x in row.items() if "mis" in name}
        for example, (_, told) in zip(rows.examples(r), shown(beside), strict=False):
            assert prompts[told[0] // 100 - 1] != prompts[example]
            pairs += 1
    assert pairs > 6


def test_answers_to_one_prompt_have_no_others():
    with pytest.raises(DataError, match="3 examples, .* answer one prompt alone, and kto asks"):
        rows_of(answers(LENGTHS[:3], prompts=[5, 5, 5]), kind=JudgedRows)
