"""Rewards by functions that misbehave: counted, never fatal, and never a neighbour's loss."""

import time
from pathlib import Path

import numpy as np
import pytest

from colossax.errors import InputError
from colossax.tasks import Answer, RewardWorkers

HERE = "tests.tasks.posttraining.rewards.functions"


def answers(*texts, **more):
    return [Answer(text=text, **more) for text in texts]


def workers(name, **how):
    return RewardWorkers(f"{HERE}:{name}", **how)


def test_rewards_are_in_the_order_of_answers():
    texts = [f"x = {n}" if n % 3 else "x = " for n in range(50)]
    with workers("parses", workers=3) as pool:
        found = pool(answers(*texts))
        again = pool(answers("1 +", "1"))
    np.testing.assert_array_equal(found.values, [float(n % 3 > 0) for n in range(50)])
    np.testing.assert_array_equal(again.values, [0.0, 1.0])
    assert found.failures == {} and found.said == ""


def test_a_function_sees_prompt_and_record():
    with workers("right") as pool:
        assert pool(answers("4", "5", record={"answer": "4"})).values.tolist() == [1.0, 0.0]
    with workers("asked", workers=1) as pool:
        prompt = ({"role": "user", "content": "2 + 2?"},)
        assert pool(answers("4", prompt=prompt)).values.tolist() == [6.0]
        assert pool([]).values.shape == (0,)


@pytest.mark.catches("a-failure-costs-its-neighbours")
def test_what_fails_is_counted_and_costs_its_neighbours_nothing():
    texts = ["a", "raise", "bb", "sleep", "ccc", "take", "die", "dddd"]
    with workers("some_fail", workers=2, seconds=1.0, failed=-1.0) as pool:
        found = pool(answers(*texts))
        np.testing.assert_array_equal(found.values, [1, -1, 2, -1, 3, -1, -1, 4])
        assert found.failures == {"error": 1, "time": 1, "memory": 1, "died": 1}
        assert found.said
        assert pool(answers("eeeee")).values.tolist() == [5.0]


@pytest.mark.catches("begun-by-a-thread-that-ends")
def test_a_process_that_is_begun_again_lives_on(tmp_path):
    """Beyond the call in which it was begun."""
    with workers("some_fail", workers=1, seconds=1.0) as pool:
        assert pool(answers("sleep", "a")).failures == {"time": 1}
        (worker,) = pool._workers
        process = worker._process
        for _ in range(2):
            time.sleep(0.2)  # the call's own threads have ended
            assert pool(answers("a", "bb")).values.tolist() == [1.0, 2.0]
            assert worker._process is process and process.poll() is None


@pytest.mark.catches("what-it-begins-goes-on")
def test_what_a_function_begins_ends_with_it(tmp_path):
    with workers("begins", workers=1, seconds=1.0) as pool:
        found = pool(answers("a", record={"file": str(tmp_path / "began")}))
        assert found.failures == {"time": 1}
    number = int((tmp_path / "began").read_text())
    until = time.monotonic() + 10
    while goes_on(number):
        assert time.monotonic() < until
        time.sleep(0.05)


def goes_on(number):
    """Whether there is such a process; one that is ended and not waited for is none."""
    try:
        return " Z " not in Path(f"/proc/{number}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_what_is_asked_is_no_input_of_the_function():
    with workers("reads", workers=1, seconds=5.0) as pool:
        found = pool(answers("a", record={"day": np.datetime64("2026-01-01")}))
        assert found.values.tolist() == [0.0] and not found.failures


@pytest.mark.catches("rewards-heard-of-what-is-printed")
def test_what_a_function_prints_is_no_reward(capfd):
    with workers("prints", workers=1) as pool:
        assert pool(answers("a")).values.tolist() == [1.0]
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("one_for_all", "returns 1 rewards for 2 answers; return one for each"),
        ("no_number", "returns nan for an answer; return a finite number"),
        ("texts", "returns a list, which are no numbers"),
        ("nothing", "returns a NoneType, which are no numbers"),
    ],
)
def test_what_is_no_reward_is_refused(name, told):
    with workers(name, workers=1) as pool, pytest.raises(InputError, match=told):
        pool(answers("a", "b"))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("functions", "found 'functions'; write it package.module:function"),
        ("nowhere.at_all:f", "cannot be imported .ModuleNotFoundError: No module named 'nowhere'"),
        (f"{HERE}:none", "cannot be imported .AttributeError: .* has no attribute 'none'"),
    ],
)
def test_a_function_that_is_not_there_is_refused(name, told):
    with pytest.raises(InputError, match=told):
        RewardWorkers(name)


def test_numbers_are_checked():
    for name in ("seconds", "memory_gb"):
        with pytest.raises(InputError, match=f"rewards: {name}"):
            workers("parses", **{name: 0.0})
    with pytest.raises(InputError, match="rewards: workers"):
        workers("parses", workers=0)
