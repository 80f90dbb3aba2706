"""Means and errors against NumPy's."""

import math

import numpy as np
import pytest

from colossax.evaluation import Ratio, Score
from colossax.evaluation.scores import mean_of, score_of, scores_of


@pytest.mark.catches("error-of-the-mean")
def test_a_mean_has_the_standard_error_of_a_mean():
    values = np.random.default_rng(0).normal(size=23)
    found = score_of([Ratio(float(one)) for one in values])
    np.testing.assert_allclose(found.value, values.mean(), rtol=1e-12)
    np.testing.assert_allclose(found.stderr, values.std(ddof=1) / math.sqrt(23), rtol=1e-12)
    shares = [Ratio(1.0), Ratio(0.0), Ratio(0.0), Ratio(1.0), Ratio(1.0)]
    np.testing.assert_allclose(score_of(shares).stderr, math.sqrt(0.6 * 0.4 / 4), rtol=1e-12)


def test_a_ratio_is_of_sums_and_its_error_what_redrawing_gives():
    rng = np.random.default_rng(1)
    under = rng.integers(20, 90, 400).astype(float)
    over = under * rng.normal(2.0, 0.4, 400)
    found = score_of([Ratio(*pair) for pair in zip(over, under, strict=True)])
    np.testing.assert_allclose(found.value, over.sum() / under.sum(), rtol=1e-12)
    drawn = rng.integers(0, 400, (4000, 400))
    redrawn = (over[drawn].sum(1) / under[drawn].sum(1)).std()
    np.testing.assert_allclose(found.stderr, redrawn, rtol=0.05)


@pytest.mark.catches("powers-untaken")
def test_perplexities_are_powers_with_the_error_that_goes_along():
    parts = [{"byte_perplexity": Ratio(3.0, 2.0), "bits": Ratio(3.0, 2.0)}, {"bits": Ratio(1.0)}]
    found = scores_of(parts)
    assert found["bits"].value == 4 / 3 and found["bits"].items == 2
    assert found["byte_perplexity"] == Score(value=math.exp(1.5), stderr=None, items=1)
    several = score_of([Ratio(3.0, 2.0), Ratio(1.0, 1.0)], exponential=True)
    plain = score_of([Ratio(3.0, 2.0), Ratio(1.0, 1.0)])
    assert several.stderr == plain.stderr * several.value
    assert score_of([Ratio(1e6)], exponential=True).value > 1e300, "no overflow"


@pytest.mark.catches("groups-by-their-items")
def test_groups_count_alike():
    groups = [
        scores_of([{"a": Ratio(1.0)}, {"a": Ratio(0.0)}, {"a": Ratio(0.0)}]),
        scores_of([{"a": Ratio(1.0), "b": Ratio(1.0)}, {"a": Ratio(0.0)}]),
    ]
    found = mean_of(groups)
    assert set(found) == {"a"} and found["a"].items == 5
    np.testing.assert_allclose(found["a"].value, (1 / 3 + 1 / 2) / 2)
    errors = [one["a"].stderr for one in groups]
    np.testing.assert_allclose(found["a"].stderr, math.sqrt(errors[0] ** 2 + errors[1] ** 2) / 2)
    assert mean_of([*groups, scores_of([{"a": Ratio(1.0)}])])["a"].stderr is None
