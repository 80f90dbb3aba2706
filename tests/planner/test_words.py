"""What is said of plans: parts that sum to the whole, and what makes one slower."""

import dataclasses

import pytest

from colossax.planner.searching.memory import Bytes
from colossax.planner.searching.predicting import Prediction
from colossax.planner.searching.seconds import Seconds
from colossax.planner.searching.sent import Sent
from colossax.planner.searching.smallest import rounded_up
from colossax.planner.searching.words import SPENT, room_words, time_words, why_slower

STEP = Seconds(compute=4.0, waited=0.5, beside=5.0, memory=0.2, fixed=0.1, bus=0.3, disk=0.4)


@pytest.mark.catches("seconds-without-slowing")
def test_what_a_step_is_made_of_sums_to_it():
    assert sum(STEP.terms.values()) == pytest.approx(STEP.total)
    assert list(SPENT) == list(STEP.terms)
    assert STEP.exposed > 0 and STEP.slowed > 0


@pytest.mark.catches("less-is-not-told")
def test_of_a_slower_plan_both_what_it_has_more_of_and_less_of_is_told():
    slower = dataclasses.replace(STEP, waited=2.5, compute=3.0, beside=0.0)
    assert why_slower(dataclasses.replace(STEP, waited=1.5), STEP) == (
        "14.1% slower: 1.500 s of collectives that matmuls wait for, where the first has 0.500 s"
    )
    first = dataclasses.replace(STEP, beside=0.0)
    assert why_slower(slower, first).endswith("0.500 s, though 1.000 s less of matmuls")
    assert why_slower(STEP, STEP) == "0.0% slower"


def test_what_is_sent_by_formula_is_of_a_step():
    sent = (
        Sent("all-gather", ("fsdp",), 5.0, 1.0, True),
        Sent("all-gather", ("fsdp",), 1.0, 1.0, False),
        Sent("all-to-all", ("ring",), 0.0, 1.0, True),
    )
    once = (Sent("all-gather", ("fsdp",), 7.0, 1.0, True),)
    size = Bytes(states=1.0, gradients=0.0, kept=0.0, working=0.0)
    one = Prediction(bytes=size, seconds=STEP, sent=sent, sent_once=once, microbatches=3)
    ((kind, axes, size, times, _),) = one.sent_in_a_step
    assert (kind, axes, size, times) == ("all-gather", ("fsdp",), 3 * 6.0 + 7.0, 3 * 2.0 + 1.0)


@pytest.mark.parametrize(
    ("size", "said"), [(38.2e6, 0.039), (0.951e9, 0.96), (12.31e9, 12.4), (5e9, 5.0)]
)
def test_small_budgets_are_rounded_up_to_two_digits(size, said):
    assert rounded_up(size) == pytest.approx(said, abs=1e-9)


def test_times_and_sizes_have_the_unit_that_shows_them():
    assert [time_words(one) for one in (0.0, 2.74e-4, 0.282)] == ["0 s", "0.274 ms", "0.282 s"]
    assert room_words(35e6) == "33.4 MiB" and room_words(76.7 * 2**30) == "76.7 GiB"
