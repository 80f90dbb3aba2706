"""Losses of heads, each against a plain reading of what it says in NumPy."""

import types

import jax.numpy as jnp
import numpy as np
import pytest

from colossax.errors import InputError
from colossax.nn import HeadConfig
from colossax.tasks import classification_loss, contrastive_loss, preference_loss, value_loss

ROWS, LENGTH = 3, 6
SEGMENTS = np.array([[0, 0, 1, 1, -1, -1], [0, 0, 0, 0, 0, -1], [0, 1, 1, 2, 3, 3]], np.int32)
"""Two documents, one, and four."""


class Told:
    """A model that has its answers ready."""

    def __init__(self, answers, **head):
        self.config = types.SimpleNamespace(head=HeadConfig(**head), causal=False)
        self.answers = jnp.asarray(answers, jnp.float32)

    def hidden(self, tokens, **_):
        return jnp.zeros((*tokens.shape, 2)), {}

    def told(self, hidden, *, segments, documents):
        of_tokens = self.config.head.pool is None
        return self.answers if of_tokens else self.answers[:, :documents]


def batch(**arrays):
    rows = {"tokens": np.zeros((ROWS, LENGTH), np.int32), "segments": SEGMENTS, **arrays}
    return {name: jnp.asarray(x) for name, x in rows.items()}


def drawn(*shape):
    return np.random.default_rng(0).standard_normal(shape)


def mean(name, loss, model, rows):
    """The loss's own mean, and over how many."""
    total, weight, coefficient = loss(model, rows)[0][name]
    assert coefficient == 1
    return float(total) / float(weight), float(weight)


def surprise(logits, label):
    return np.log(np.exp(logits).sum()) - logits[label]


@pytest.mark.catches("absent-document-counts")
def test_classes_of_documents_count_alike_where_they_are():
    logits = drawn(ROWS, 4, 3)
    labels = np.array([[2, 0, 1, 1], [1, 2, 2, 2], [0, -1, 2, 1]], np.int32)
    counted = [(0, 0), (0, 1), (1, 0), (2, 0), (2, 2), (2, 3)]
    want = np.mean([surprise(logits[at], labels[at]) for at in counted])
    found = mean(
        "cross_entropy",
        classification_loss(),
        Told(logits, outputs=3, pool="mean"),
        batch(labels=labels),
    )
    assert found == (pytest.approx(want, rel=1e-5), 6)


def test_a_class_of_each_row():
    logits, labels = drawn(ROWS, 1, 3), np.array([2, -1, 0], np.int32)
    want = (surprise(logits[0, 0], 2) + surprise(logits[2, 0], 0)) / 2
    model = Told(logits, outputs=3, pool="first")
    found = mean("cross_entropy", classification_loss(), model, batch(labels=labels))
    assert found == (pytest.approx(want, rel=1e-5), 2)


@pytest.mark.catches("no-class-is-one")
def test_classes_of_tokens_where_there_is_one():
    logits = drawn(ROWS, LENGTH, 4)
    targets = np.arange(ROWS * LENGTH, dtype=np.int32).reshape(ROWS, LENGTH) % 4
    targets[0, :2] = -100
    weights = (SEGMENTS >= 0).astype(np.float32)
    at = [
        (r, t) for r in range(ROWS) for t in range(LENGTH) if weights[r, t] and targets[r, t] >= 0
    ]
    want = np.mean([surprise(logits[one], targets[one]) for one in at])
    rows = batch(targets=targets, weights=weights)
    found = mean("cross_entropy", classification_loss(), Told(logits, outputs=4), rows)
    assert found == (pytest.approx(want, rel=1e-5), len(at))


@pytest.mark.catches("padding-has-a-value")
def test_values_of_tokens_leave_padding_out():
    told, values = drawn(ROWS, LENGTH, 1), drawn(2, ROWS, LENGTH)[1].astype(np.float32)
    values[2, 2] = np.nan
    counts = (SEGMENTS >= 0) & np.isfinite(values)
    want = np.mean((told[..., 0] - values)[counts] ** 2)
    found = mean("squared_error", value_loss(), Told(told, outputs=1), batch(token_values=values))
    assert found == (pytest.approx(want, rel=1e-5), counts.sum())


def test_values_of_documents():
    told, values = drawn(ROWS, 2, 1), drawn(2, ROWS, 2)[1].astype(np.float32)
    there = np.array([[1, 1], [1, 0], [1, 1]], bool)
    want = np.mean((told[..., 0] - values)[there] ** 2)
    model = Told(told, outputs=1, pool="last")
    found = mean("squared_error", value_loss(), model, batch(values=values))
    assert found == (pytest.approx(want, rel=1e-5), 5)


def test_a_row_of_two_documents_prefers_its_first():
    rewards = drawn(ROWS, 4, 1)
    margins = rewards[[0, 2], 0, 0] - rewards[[0, 2], 1, 0]
    want = np.mean(np.log1p(np.exp(-margins)))
    model = Told(rewards, outputs=1, pool="last", bias=False)
    assert mean("preference", preference_loss(), model, batch()) == (
        pytest.approx(want, rel=1e-5),
        2,
    )


@pytest.mark.catches("pairs-of-the-first-two")
@pytest.mark.catches("pairs-without-weight-count")
@pytest.mark.catches("margin-of-rewards-forgotten")
def test_rewards_of_several_pairs_are_to_be_ahead_by_a_margin():
    """Of pairs that are whole and count: row 2 has two, of which one has no weight."""
    rewards = drawn(ROWS, 4, 1)
    weights = np.where(SEGMENTS >= 0, 1.0, 0.0).astype(np.float32)
    weights[2, SEGMENTS[2] == 1] = 0
    ahead = np.array([rewards[0, 0, 0] - rewards[0, 1, 0], rewards[2, 2, 0] - rewards[2, 3, 0]])
    want = np.mean(np.log1p(np.exp(0.7 - ahead)))
    model = Told(rewards, outputs=1, pool="last", bias=False)
    loss, rows = preference_loss(documents=4, margin=0.7), batch(weights=weights)
    assert mean("preference", loss, model, rows) == (pytest.approx(want, rel=1e-5), 2)
    told = {name: float(x) / float(w) for name, (x, w) in loss(model, rows)[1].items()}
    assert told == {
        "accuracy": np.mean(ahead > 0),
        "margin": pytest.approx(np.mean(ahead), rel=1e-5),
        "chosen_reward": pytest.approx(np.mean(rewards[[0, 2], [0, 2], 0]), rel=1e-5),
        "rejected_reward": pytest.approx(np.mean(rewards[[0, 2], [1, 3], 0]), rel=1e-5),
    }


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"documents": 3}, "preference_loss: documents is 3; give an even number of 2 or more"),
        ({"margin": -1.0}, "preference_loss: margin: found -1.0"),
    ],
)
def test_numbers_of_no_pairs_are_refused(numbers, message):
    with pytest.raises(InputError, match=message):
        preference_loss(**numbers)


def test_partners_are_told_from_the_other_documents_of_their_row():
    told, temperature = drawn(ROWS, 4, 5), 0.5
    found = []
    for row, documents in ((0, 2), (2, 4)):
        for one in range(documents):
            others = [other for other in range(documents) if other != one]
            scores = told[row, others] @ told[row, one] / temperature
            found.append(surprise(scores, others.index(one ^ 1)))
    model = Told(told, pool="mean")
    assert mean("contrastive", contrastive_loss(documents=4, temperature=0.5), model, batch()) == (
        pytest.approx(np.mean(found), rel=1e-5),
        6,
    )


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"documents": 5}, "contrastive_loss: documents is 5; give an even number of 4 or more"),
        ({"documents": 4, "temperature": 0.0}, "temperature: found 0.0; give a number above 0"),
    ],
)
def test_numbers_of_no_use_are_refused(numbers, message):
    with pytest.raises(InputError, match=message):
        contrastive_loss(**numbers)
