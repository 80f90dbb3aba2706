"""Policy gradients against their formulas in float64, answer by answer; advantages by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from colossax.errors import InputError
from colossax.layerwise import Maximum
from colossax.tasks import (
    PolicyConfig,
    clipped_value_loss,
    gae,
    group_advantages,
    kl_estimate,
    policy_loss,
    reference_options,
    whitened,
)
from tests.tasks.posttraining.bigram import (
    DOCUMENTS,
    UNEVEN,
    Table,
    check,
    models_of,
    rows_of,
    said,
    weights_of,
)

POLICY, REFERENCE, BEFORE = weights_of(0), weights_of(1), weights_of(0)
BEFORE = [one + 0.2 * other for one, other in zip(BEFORE, weights_of(3), strict=True)]


def given():
    batch = rows_of(UNEVEN)
    advantages = np.random.default_rng(4).normal(size=batch["tokens"].shape)
    return {
        **batch,
        "advantages": advantages.astype(np.float32),
        "old_logps": said(BEFORE, batch).astype(np.float32),
        "reference_logps": said(REFERENCE, batch).astype(np.float32),
    }


def tempered(weights, temperature):
    """Matrices whose logits are over a temperature."""
    return [weights[0], weights[1] / temperature]


ESTIMATES = {
    "k1": lambda d: d,
    "k2": lambda d: d**2 / 2,
    "k3": lambda d: np.exp(-d) - 1 + d,
}


def truth(config, policy, batch):
    """The loss, answer by answer and token by token."""
    logps = said(tempered(policy, config.temperature), batch)
    answers = []
    for row in range(len(logps)):
        for number in range(batch["segments"][row].max() + 1):
            told = (batch["segments"][row] == number) & (batch["weights"][row] > 0)
            each = []
            for lp, old, ref, a in zip(
                logps[row][told],
                batch["old_logps"][row][told],
                batch["reference_logps"][row][told],
                batch["advantages"][row][told],
                strict=True,
            ):
                ratio = np.exp(lp - old)
                bounded = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
                gained = min(ratio * a, bounded * a)
                if config.dual_clip is not None and a < 0:
                    gained = max(gained, config.dual_clip * a)
                apart = ESTIMATES[config.estimator](lp - ref)
                each.append(config.divergence * apart - gained)
            answers.append(each)
    if config.normaliser == "token":
        return sum(map(sum, answers)) / sum(map(len, answers))
    if config.normaliser == "longest":
        return sum(map(sum, answers)) / (len(answers) * config.longest)
    return np.mean([np.mean(each) for each in answers])


CASES = {
    "ppo": PolicyConfig(normaliser="token"),
    "grpo": PolicyConfig(divergence=0.04),
    "dapo": PolicyConfig(clip_high=0.28, normaliser="token", divergence=0.1, estimator="k2"),
    "dr grpo": PolicyConfig(normaliser="longest", longest=9, divergence=0.1, estimator="k1"),
    "dual": PolicyConfig(dual_clip=1.5, clip_low=0.9, clip_high=0.9),
    "tempered": PolicyConfig(temperature=0.7),
}


@pytest.mark.catches("advantages-never-clipped")
@pytest.mark.catches("answers-weigh-by-length")
@pytest.mark.catches("dual-clip-of-gains")
@pytest.mark.parametrize("case", CASES)
def test_it_is_its_formula(case):
    config, batch = CASES[case], given()
    loss = policy_loss(config, documents=DOCUMENTS)

    def scalar(models, arrays):
        terms, _ = loss(models, arrays)
        return terms, {}

    check(scalar, lambda w: truth(config, w, batch), batch, lambda policy: policy, POLICY)


def test_clipping_happens_in_these_cases():
    batch = given()
    ratio = np.exp(said(POLICY, batch) - batch["old_logps"])[batch["weights"] > 0]
    assert (ratio > 1.28).any() and (ratio < 0.8).any() and ((0.8 < ratio) & (ratio < 1.2)).any()


def test_an_answer_that_is_learned_from_once_has_a_ratio_of_one():
    """Exactly; its gradient is that of the advantage times the log-probability."""
    batch = {name: x for name, x in given().items() if name != "old_logps"}
    config = PolicyConfig(normaliser="token")
    loss = policy_loss(config, documents=DOCUMENTS)
    terms, metrics = loss(Table(*POLICY), {name: jnp.asarray(x) for name, x in batch.items()})
    total, count = metrics["ratio"]
    assert total == count == batch["weights"].sum()
    assert isinstance(metrics["largest_ratio"], Maximum) and metrics["largest_ratio"].value == 1
    assert metrics["clipped"][0] == 0
    told = (batch["advantages"] * batch["weights"]).sum()
    np.testing.assert_allclose(terms["policy"][0], -told, rtol=1e-5)


def test_the_divergence_of_a_policy_that_is_its_reference_is_zero():
    """Exactly, whatever the estimator, and at the temperature that answers were drawn at."""
    batch = {name: jnp.asarray(x) for name, x in given().items() if name != "reference_logps"}
    same = models_of(policy=Table(*POLICY), reference=Table(*POLICY))
    for estimator, temperature in zip(ESTIMATES, (1.0, 0.7, 0.7), strict=True):
        config = PolicyConfig(divergence=1.0, estimator=estimator, temperature=temperature)
        loss = policy_loss(config, documents=DOCUMENTS)
        prepared = reference_options(temperature=temperature)["prepare"](same, batch)
        terms, _ = loss(same, prepared)
        assert terms["divergence"][0] == 0


def test_what_is_not_told_may_be_anything():
    batch = {name: jnp.asarray(x) for name, x in given().items()}
    loss = policy_loss(PolicyConfig(divergence=0.1), documents=DOCUMENTS)
    odd = dict(batch)
    for name in ("advantages", "old_logps", "reference_logps"):
        odd[name] = jnp.where(batch["weights"] > 0, batch[name], jnp.nan)
    for (value, count), (wanted, _) in zip(
        (term[:2] for term in loss(Table(*POLICY), odd)[0].values()),
        (term[:2] for term in loss(Table(*POLICY), batch)[0].values()),
        strict=True,
    ):
        assert count > 0
        np.testing.assert_array_equal(value, wanted)


def test_estimators_are_of_the_divergence():
    """Over tokens that the policy drew k1 and k3 are KL on average; k3 and k2 are never below 0."""
    rng = np.random.default_rng(0)
    p, q = (np.exp(x) / np.exp(x).sum() for x in rng.normal(0, 0.3, (2, 50)))
    true = (p * np.log(p / q)).sum()
    d = jnp.asarray(np.log(p / q), jnp.float32)
    found = {name: np.asarray(kl_estimate(d, name), np.float64) for name in ESTIMATES}
    assert (p * found["k1"]).sum() == pytest.approx(true, rel=1e-5)
    assert (p * found["k3"]).sum() == pytest.approx(true, rel=1e-5)
    assert (p * found["k2"]).sum() == pytest.approx(true, rel=0.2)
    assert min(found["k2"].min(), found["k3"].min()) >= 0


def test_a_critic_learns_returns_within_a_bound():
    rng = np.random.default_rng(0)
    values, old, returns = rng.normal(size=(3, 2, 5))
    weights = rng.integers(0, 2, (2, 5))
    near = old + np.clip(values - old, -0.2, 0.2)
    each = 0.5 * np.maximum((values - returns) ** 2, (near - returns) ** 2) * weights
    arrays = (jnp.asarray(x, jnp.float32) for x in (values, old, returns, weights))
    total, count = clipped_value_loss(*arrays)
    np.testing.assert_allclose(total, each.sum(), rtol=1e-6)
    assert count == weights.sum()
    with pytest.raises(InputError, match="clipped_value_loss: clip"):
        clipped_value_loss(*(jnp.ones((1, 1)) for _ in range(4)), clip=0.0)


@pytest.mark.catches("groups-are-one")
def test_group_advantages():
    rewards, groups = np.array([1.0, 5.0, 3.0, 2.0, 2.0]), np.array([0, 7, 0, 7, 7])
    found = group_advantages(rewards, groups)
    np.testing.assert_allclose(found[[0, 2]], np.array([-1, 1]) / (np.sqrt(2) + 1e-4))
    np.testing.assert_allclose(found[[1, 3, 4]], np.array([2, -1, -1]) / (np.sqrt(3) + 1e-4))
    np.testing.assert_allclose(group_advantages(rewards, groups, scaled=False)[1], 2)
    np.testing.assert_array_equal(group_advantages(np.ones(3), np.zeros(3)), 0)
    with pytest.raises(InputError, match="groups: 1 has one answer"):
        group_advantages(np.ones(3), np.array([0, 0, 1]))
    with pytest.raises(InputError, match=r"rewards have shape \[3\] and groups \[2\]"):
        group_advantages(np.ones(3), np.zeros(2))
    with pytest.raises(InputError, match="that of answer 1 is nan"):
        group_advantages(np.array([0.0, np.nan]), np.zeros(2))


@pytest.mark.catches("advantages-of-one-step")
def test_gae():
    """By the sum that it stands for."""
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(2, 6))
    behind = np.append(values[1:], 0.0)
    deltas = rewards + 0.9 * behind - values
    wanted = [sum((0.9 * 0.8) ** k * deltas[t + k] for k in range(6 - t)) for t in range(6)]
    np.testing.assert_allclose(gae(rewards, values, discount=0.9, decay=0.8), wanted)
    # Without discount and with decay 1: what came in the end, less what was expected.
    np.testing.assert_allclose(gae(rewards, values, decay=1.0)[0], rewards.sum() - values[0])
    with pytest.raises(InputError, match=r"rewards have shape \[2\] and values \[3\]"):
        gae(np.ones(2), np.ones(3))
    with pytest.raises(InputError, match="gae: decay"):
        gae(np.ones(2), np.ones(2), decay=1.5)


def test_whitened():
    rng = np.random.default_rng(0)
    advantages, weights = rng.normal(3, 2, (4, 6)), rng.integers(0, 2, (4, 6))
    found = whitened(advantages, weights)
    own = found[weights > 0]
    assert own.mean() == pytest.approx(0, abs=1e-9) and own.std() == pytest.approx(1, rel=1e-6)
    assert not found[weights == 0].any()
    with pytest.raises(InputError, match="whitened: tokens that count"):
        whitened(advantages, np.zeros((4, 6)))


def test_refusals():
    with pytest.raises(InputError, match="policy.normaliser: unknown 'tokens'; did you mean 'tok"):
        PolicyConfig(normaliser="tokens")
    with pytest.raises(InputError, match="policy.longest: found None beside the normaliser longe"):
        PolicyConfig(normaliser="longest")
    with pytest.raises(InputError, match="policy.dual_clip"):
        PolicyConfig(dual_clip=0.5)
    loss = policy_loss(PolicyConfig(divergence=0.1), documents=DOCUMENTS)
    batch = {name: jnp.asarray(x) for name, x in given().items()}
    for name, told in (
        ("advantages", "as group_advantages makes"),
        ("reference_logps", "a diverg"),
    ):
        with pytest.raises(InputError, match=f"no '{name}'.*{told}"):
            loss(Table(*POLICY), {n: x for n, x in batch.items() if n != name})
