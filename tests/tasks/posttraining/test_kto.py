"""KTO against its formula in float64, and what its step is given."""

import jax.numpy as jnp
import numpy as np
import pytest

from colossax.errors import InputError
from colossax.tasks import kto_loss, kto_options
from tests.tasks.posttraining.bigram import (
    DOCUMENTS,
    UNEVEN,
    Table,
    answers,
    check,
    loss_of,
    models_of,
    rows_of,
    weights_of,
)

POLICY, REFERENCE = weights_of(0), weights_of(1)
GOOD = np.array([[1, 0, 0, 1], [0, 0, 1, 1], [1, 1, 1, 0], [0, 1, 0, 0]], np.int32)
MODELS = models_of(policy=Table(*POLICY), reference=Table(*REFERENCE))
LOSS = kto_loss(documents=DOCUMENTS, beta=0.3, desirable=1.0, undesirable=1.5)


def given(flip=False):
    """Rows, and answers to other prompts; `flip`: those of which the policy says less."""
    other = rows_of([*reversed(UNEVEN)], seed=7)
    batch = {**rows_of(UNEVEN), **{f"mismatched_{name}": x for name, x in other.items()}}
    return {**batch, "desirable": 1 - GOOD if flip else GOOD}


def other_of(batch):
    return {name: batch[f"mismatched_{name}"] for name in rows_of(UNEVEN)}


def above_it(policy, batch):
    return answers(policy, batch)[:, 0] - answers(REFERENCE, batch)[:, 0]


def kto(policy, batch, z):
    h = above_it(policy, batch)
    good = np.concatenate([GOOD[row][: len(one)] for row, one in enumerate(UNEVEN)]) > 0
    further = np.where(good, h - z, z - h)
    return np.mean(np.where(good, 1.0, 1.5) * (1 - 1 / (1 + np.exp(-0.3 * further))))


def prepared(batch, models=MODELS):
    arrays = {name: jnp.asarray(x) for name, x in batch.items()}
    return kto_options(documents=DOCUMENTS)["prepare"](models, arrays)


@pytest.mark.catches("kto-without-its-weights")
def test_it_is_its_formula():
    """The mean over other answers is made of the policy, and not differentiated."""
    batch = prepared(given())
    z = max(0.0, above_it(POLICY, other_of(given())).mean())
    np.testing.assert_allclose(batch["kto_baseline"], z, rtol=1e-5, atol=1e-6)

    def models(policy):
        return models_of(policy=policy, reference=MODELS.reference)

    check(LOSS, lambda policy: kto(policy, given(), z), batch, models, POLICY)


@pytest.mark.catches("kto-baseline-below-zero")
def test_the_baseline_is_that_of_other_prompts_and_never_below_zero():
    raw = above_it(POLICY, other_of(given())).mean()
    swapped = models_of(policy=MODELS.reference, reference=MODELS.policy)
    found = [prepared(given(), models)["kto_baseline"] for models in (MODELS, swapped)]
    assert raw != 0
    for one, value in zip(found, (raw, -raw), strict=True):
        np.testing.assert_allclose(one, np.full(len(UNEVEN), max(value, 0.0)), rtol=1e-5, atol=1e-6)


def test_metrics():
    batch = prepared(given())
    _, metrics = loss_of(LOSS, MODELS, batch)
    h = 0.3 * above_it(POLICY, given())
    good = np.concatenate([GOOD[row][: len(one)] for row, one in enumerate(UNEVEN)]) > 0
    np.testing.assert_allclose(metrics["chosen_reward"], h[good].mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["rejected_reward"], h[~good].mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["kl"], batch["kto_baseline"][0], rtol=1e-6)


def test_refusals():
    batch = given()
    with pytest.raises(InputError, match="the batch has no 'mismatched_positions'; add answers"):
        prepared({name: x for name, x in batch.items() if name != "mismatched_positions"})
    with pytest.raises(InputError, match="the batch has no 'reference_logps'; give boost what kto"):
        loss_of(LOSS, MODELS, batch)
    with pytest.raises(InputError, match=r"'desirable' of the batch is to say .* \[rows, 4\]"):
        loss_of(LOSS, MODELS, prepared({**batch, "desirable": batch["desirable"][:, :2]}))
    with pytest.raises(InputError, match=r"one model and it has no adapter"):
        prepared(batch, MODELS.policy)
    with pytest.raises(InputError, match=r"of the models \['base', 'policy'\] none is it"):
        prepared(batch, models_of(policy=MODELS.policy, base=MODELS.reference))
    with pytest.raises(InputError, match="policy: of the models .* name the one that learns so"):
        loss_of(LOSS, models_of(actor=MODELS.policy), prepared(batch))
    smaller = Table(REFERENCE[0], REFERENCE[1][:, :-1])
    with pytest.raises(InputError, match="have 13 of the policy and 12 of 'reference' tokens"):
        prepared(batch, models_of(policy=MODELS.policy, reference=smaller))
    with pytest.raises(InputError, match="kto_loss: documents is 0; give 1 or more"):
        kto_loss(documents=0)
