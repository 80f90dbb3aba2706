"""Random models, targets and budgets, planned: what is named fits as compiled once more.

One of the 60 cases of bench/plan_honest.py, which compiles quickly.
"""

import pytest

from tests.aot.drawn import drawn, judged

pytestmark = pytest.mark.aot


@pytest.mark.catches("named-as-formulas-say")
@pytest.mark.parametrize("seed", [36])
def test_no_plan_is_over_its_budget(seed):
    found = judged(drawn(seed))
    assert found["compiled"] == found["said"], found
    assert found["compiled"] <= found["budget"], found


def test_draws_are_the_same_each_time_and_differ_by_seed():
    told = [drawn(seed).told for seed in range(60)]
    assert told == [drawn(seed).told for seed in range(60)]
    assert len({each.partition(": ")[2] for each in told}) == 60
