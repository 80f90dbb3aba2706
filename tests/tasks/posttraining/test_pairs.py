"""Objectives on preferences against their formulas in float64, document by document."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.errors import InputError
from colossax.tasks import dpo_loss, ipo_loss, orpo_loss, simpo_loss
from tests.tasks.posttraining.bigram import (
    DOCUMENTS,
    UNEVEN,
    Table,
    answers,
    check,
    loss_of,
    models_of,
    rows_of,
    said,
    weights_of,
)

POLICY, REFERENCE = weights_of(0), weights_of(1)


def softplus(x):
    return np.logaddexp(0, x)


def pairs(weights, batch, *, mean=False):
    """Of each pair what is said of the chosen and of the rejected answer."""
    found = answers(weights, batch)
    one = found[:, 0] / (found[:, 1] if mean else 1)
    return one[0::2], one[1::2]


def ahead(policy, batch, *, mean=False):
    own, other = (pairs(weights, batch, mean=mean) for weights in (policy, REFERENCE))
    return (own[0] - other[0]) - (own[1] - other[1])


def dpo(policy, batch):
    return softplus(-0.3 * ahead(policy, batch)).mean()


def ipo(policy, batch):
    return np.mean((ahead(policy, batch, mean=True) - 1 / (2 * 0.3)) ** 2)


def simpo(policy, batch):
    chosen, rejected = pairs(policy, batch, mean=True)
    return softplus(0.7 - 2.0 * (chosen - rejected)).mean()


def orpo(policy, batch):
    chosen, rejected = pairs(policy, batch, mean=True)
    odds = [one - np.log(1 - np.exp(one)) for one in (chosen, rejected)]
    told = answers(policy, batch)[0::2]
    return -told[:, 0].sum() / told[:, 1].sum() + 0.3 * softplus(odds[1] - odds[0]).mean()


CASES = {
    "dpo": (dpo_loss(documents=DOCUMENTS, beta=0.3), dpo),
    "ipo": (ipo_loss(documents=DOCUMENTS, beta=0.3), ipo),
    "simpo": (simpo_loss(documents=DOCUMENTS, beta=2.0, margin=0.7), simpo),
    "orpo": (orpo_loss(documents=DOCUMENTS, beta=0.3), orpo),
}


def prepared(lengths=UNEVEN):
    batch = rows_of(lengths)
    return {**batch, "reference_logps": said(REFERENCE, batch).astype(np.float32)}


@pytest.mark.catches("ipo-of-sums")
@pytest.mark.catches("simpo-of-sums")
@pytest.mark.catches("odds-of-sums")
@pytest.mark.parametrize("case", CASES)
def test_it_is_its_formula(case):
    loss, truth = CASES[case]
    batch = prepared()
    check(loss, lambda policy: truth(policy, batch), batch, lambda policy: policy, POLICY)


@pytest.mark.catches("half-a-pair-counts")
@pytest.mark.parametrize("case", CASES)
def test_half_a_pair_counts_for_nothing(case):
    """A row with a chosen answer alone, and one without any."""
    loss, _ = CASES[case]
    policy = models_of(policy=Table(*POLICY), reference=Table(*REFERENCE))
    whole, _ = loss_of(loss, policy, prepared(UNEVEN[:2]))
    batch = prepared([*UNEVEN[:2], [(2, 5)], []])
    found, metrics = loss_of(loss, policy, batch)
    np.testing.assert_allclose(found, whole, rtol=1e-6)
    assert all(np.isfinite(value) for value in metrics.values())


def test_a_policy_that_is_its_reference_prefers_nothing():
    batch = rows_of(UNEVEN)
    batch["reference_logps"] = said(POLICY, batch).astype(np.float32)
    value, metrics = loss_of(CASES["dpo"][0], Table(*POLICY), batch)
    np.testing.assert_allclose(value, np.log(2), rtol=1e-6)
    np.testing.assert_allclose(metrics["margin"], 0, atol=1e-5)


def test_metrics_are_of_pairs():
    batch = prepared()
    _, metrics = loss_of(CASES["dpo"][0], Table(*POLICY), batch)
    margin = 0.3 * ahead(POLICY, batch)
    chosen, rejected = pairs(POLICY, batch)
    wanted = {
        "accuracy": (margin > 0).mean(),
        "margin": margin.mean(),
        "chosen_logp": chosen.mean(),
        "rejected_logp": rejected.mean(),
    }
    assert metrics.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)


def test_who_is_ahead_is_told_without_the_margin_that_is_wanted():
    batch = prepared()
    _, metrics = loss_of(CASES["simpo"][0], Table(*POLICY), batch)
    chosen, rejected = pairs(POLICY, batch, mean=True)
    np.testing.assert_allclose(metrics["margin"], 2 * (chosen - rejected).mean(), rtol=1e-5)
    assert metrics["accuracy"] == (chosen > rejected).mean()


def test_an_answer_that_is_certain_has_finite_odds():
    batch = {name: jnp.asarray(x) for name, x in prepared([UNEVEN[0]]).items()}

    def of(out):
        return loss_of(CASES["orpo"][0], Table(np.zeros_like(POLICY[0]), out), batch)[0]

    # All logits are equal but where a token is alone: of a vocabulary of one all is certain.
    batch = {**batch, "targets": jnp.zeros_like(batch["targets"])}
    value, grad = jax.value_and_grad(of)(jnp.zeros((POLICY[1].shape[0], 1)))
    assert np.isfinite(value) and np.isfinite(grad).all()


def test_an_answer_that_is_not_there_has_finite_odds():
    """A pair that is not there has a mean of 0, whose odds and their gradient would be none."""
    batch = prepared([UNEVEN[0], []])
    check(CASES["orpo"][0], lambda w: orpo(w, batch), batch, lambda policy: policy, POLICY)


def test_refusals():
    with pytest.raises(InputError, match="dpo_loss: documents is 3; give an even number"):
        dpo_loss(documents=3)
    with pytest.raises(InputError, match="simpo_loss: beta"):
        simpo_loss(documents=2, beta=0.0)
    with pytest.raises(InputError, match="orpo_loss: beta"):
        orpo_loss(documents=2, beta=-1.0)
    with pytest.raises(InputError, match="the batch has no 'reference_logps'; give boost"):
        dpo_loss(documents=4)(
            Table(*POLICY), {k: jnp.asarray(x) for k, x in rows_of(UNEVEN).items()}
        )
