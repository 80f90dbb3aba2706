"""What is chosen from logits follows the distribution that was asked for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.inference.engine.program import all_allowed
from colossax.inference.engine.sampling import Draws, choose

VOCAB, ROWS = 64, 20_000
CRITICAL = 0.999
"""Quantile of chi squared: one draw in a thousand would fail, and the seed is fixed."""

SETTINGS = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "top k": {"top_k": 7},
    "top p": {"top_p": 0.6},
    "min p": {"min_p": 0.2},
    "all": {"temperature": 1.5, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
    "penalties": {"presence": 1.5, "frequency": 0.7},
    "bias": {"bias": {3: 2.0, 9: -100.0}},
    "mask": {"mask": range(0, VOCAB, 3)},
}
SAID = (5, 5, 8, 5, 3)


def expected(logits, how):
    """The distribution, in float64, by sorting."""
    x = logits.astype(np.float64).copy()
    for token in set(SAID):
        x[token] -= how.get("presence", 0) + how.get("frequency", 0) * SAID.count(token)
    for token, value in how.get("bias", {}).items():
        x[token] += value
    if "mask" in how:
        x[[i for i in range(VOCAB) if i not in how["mask"]]] = -np.inf
    x /= how.get("temperature", 1.0)
    if how.get("top_k"):
        x[x < np.sort(x)[-how["top_k"]]] = -np.inf
    p = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
    if "top_p" in how:
        order = np.argsort(-p)
        kept = order[: int(np.sum(np.cumsum(p[order]) < how["top_p"])) + 1]
        p = np.where(np.isin(np.arange(VOCAB), kept), p, 0)
    p[p < how.get("min_p", 0) * p.max()] = 0
    return p / p.sum()


def draws(rows, how):
    made = Draws.empty(rows)
    made.temperature[:] = how.get("temperature", 1.0)
    made.seed[:] = np.arange(rows)
    for name in ("top_k", "top_p", "min_p", "presence", "frequency"):
        if name in how:
            getattr(made, name)[:] = how[name]
    for i, (token, value) in enumerate(how.get("bias", {}).items()):
        made.bias_tokens[:, i], made.bias_values[:, i] = token, value
    made.begin[:] = 2
    return made


def mask_of(rows, how):
    if "mask" not in how:
        return all_allowed(rows, VOCAB)
    bits = np.zeros(VOCAB, np.uint8)
    bits[list(how["mask"])] = 1
    return np.tile(np.packbits(bits, bitorder="little").view(np.uint32), (rows, 1))


def chosen(logits, made, mask, *, masked):
    rows = len(logits)
    said = np.tile(np.asarray([50, 50, *SAID, 40, 40], np.int32), (rows, 1))
    position = jnp.full((rows,), 2 + len(SAID), jnp.int32)
    made = jax.tree.map(jnp.asarray, made)
    given = (jnp.asarray(said), position, jnp.asarray(mask), jnp.asarray(masked))
    return jax.tree.map(np.asarray, jax.jit(choose)(jnp.asarray(logits), made, *given))


@pytest.mark.catches("top-k-of-one-less")
@pytest.mark.catches("top-p-stops-short")
@pytest.mark.catches("min-p-of-all")
@pytest.mark.catches("penalty-of-the-prompt")
@pytest.mark.catches("bias-unused")
@pytest.mark.catches("mask-upside-down")
@pytest.mark.parametrize("name", SETTINGS)
def test_draws_follow_the_distribution(name):
    """Chi squared of many draws, and nothing that cannot come."""
    from scipy.stats import chi2

    how = SETTINGS[name]
    logits = np.random.default_rng(0).normal(size=VOCAB).astype(np.float32) * 2
    rows = np.tile(logits, (ROWS, 1))
    masked = "mask" in how
    found = chosen(rows, draws(ROWS, how), mask_of(ROWS, how), masked=masked)
    assert found.sound.all()
    p = expected(logits, how)
    counts = np.bincount(found.token, minlength=VOCAB)
    assert not counts[p == 0].any()
    # Tokens that come fewer than five times are counted together.
    order = np.argsort(p)
    few = np.cumsum(p[order]) * ROWS < 5
    groups = [order[few], *order[~few, None]]
    sums = np.asarray([[counts[g].sum(), p[g].sum() * ROWS] for g in groups if p[g].sum() > 0])
    statistic = np.sum((sums[:, 0] - sums[:, 1]) ** 2 / sums[:, 1])
    assert statistic < chi2.ppf(CRITICAL, max(1, len(sums) - 1))


def test_rows_with_other_wishes_do_not_meet():
    """Each row as if all rows had asked for the same."""
    logits = np.random.default_rng(1).normal(size=(len(SETTINGS), VOCAB)).astype(np.float32)
    each = [draws(len(SETTINGS), how) for how in SETTINGS.values()]
    mixed = Draws(
        **{
            field.name: np.stack([getattr(one, field.name)[i] for i, one in enumerate(each)])
            for field in dataclasses.fields(Draws)
        }
    )
    masks = np.stack([mask_of(1, how)[0] for how in SETTINGS.values()])
    together = chosen(logits, mixed, masks, masked=True)
    for i, (one, how) in enumerate(zip(each, SETTINGS.values(), strict=True)):
        lone = chosen(logits, one, mask_of(len(logits), how), masked="mask" in how)
        assert together.token[i] == lone.token[i]


def test_greedy_takes_the_likeliest_that_is_left():
    made = draws(2, {"bias": {7: 1.0}})
    made.temperature[:] = 0
    logits = np.zeros((2, VOCAB), np.float32)
    logits[1, 20] = 3.0
    found = chosen(logits, made, all_allowed(2, VOCAB), masked=False)
    assert found.token.tolist() == [7, 20]


@pytest.mark.catches("nothing-left-is-sound")
def test_what_cannot_be_chosen_from_is_told():
    logits = np.zeros((4, VOCAB), np.float32)
    logits[1, 3], logits[2, :] = np.nan, np.inf
    mask = all_allowed(4, VOCAB)
    mask[3] = 0
    found = chosen(logits, draws(4, {}), mask, masked=True)
    assert found.sound.tolist() == [True, False, False, False]


@pytest.mark.catches("top-p-of-nothing")
def test_the_least_share_leaves_the_likeliest():
    logits = np.random.default_rng(2).normal(size=(50, VOCAB)).astype(np.float32)
    found = chosen(logits, draws(50, {"top_p": 1e-42}), all_allowed(50, VOCAB), masked=False)
    np.testing.assert_array_equal(found.token, logits.argmax(-1))


def test_ties_at_a_threshold_all_stay():
    logits = np.zeros((2000, VOCAB), np.float32)
    logits[:, 4:8] = 2.0
    found = chosen(logits, draws(2000, {"top_k": 2}), all_allowed(2000, VOCAB), masked=False)
    assert set(found.token.tolist()) == {4, 5, 6, 7}
