"""When a verdict keeps a kernel from being taken, and what decides on it."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from colossax.pallas.proof import Outcome, Verdict, trial
from colossax.pallas.proof.trial import Trial, prove


def proved(own, **peers):
    return Verdict(outcome=Outcome.PROVED, seconds=own, peers=peers)


@pytest.mark.catches("slow-kernel-taken")
@pytest.mark.parametrize(
    "own, theirs, taken",
    [
        ((1.0, 1.0, 1.0), (2.0, 2.0, 2.0), True),
        ((1.02, 1.02, 1.03), (1.0, 1.0, 1.0), True),
        ((1.05, 1.06, 1.07), (1.0, 1.0, 1.0), False),
        ((1.2, 1.21, 1.22), (1.0, 1.0, 1.0), False),
        ((0.9, 1.3, 1.3), (0.9, 1.0, 1.0), True),  # noise: the fastest is no slower
        ((1.3, 1.3, 1.3), (1.0, 1.0, 1.4), True),  # theirs varies as much
        ((1.2, 1.2, 1.2), (), True),  # it was not measured
    ],
)
def test_a_kernel_that_is_slower_in_every_repeat_is_left(own, theirs, taken):
    verdict = proved(own, cudnn=theirs, xla=(9.0, 9.0, 9.0))
    assert (verdict.why_not("cudnn") is None) is taken
    assert verdict.why_not("xla") is None, "what would be taken in its place counts"
    assert verdict.why_not(None) is None


def test_how_much_slower_is_said():
    said = proved((3.0, 3.0, 3.0), cudnn=(2.0, 2.0, 2.0)).why_not("cudnn")
    assert said == "right on this device, but it takes 1.50 times as long as cudnn"
    assert (
        proved((2.0,), cudnn=(3.0,), xla=(8.0,)).text == "proved, rate 1.50 of cudnn, 4.00 of xla"
    )


def test_a_verdict_travels_as_json():
    verdict = dataclasses.replace(proved((0.1, 0.2), xla=(0.3,)), reason="why")
    assert Verdict.from_json(verdict.to_json()) == verdict


X = jnp.asarray(np.random.default_rng(0).normal(size=(64, 16)), jnp.bfloat16)


def case(kernel, **fields):
    """Of an operation that doubles."""
    return Trial(
        name="doubling",
        inputs=(X,),
        kernel=lambda x: {"out": kernel(x)},
        truth=lambda x: {"out": 2 * x},
        tolerance=1e-2,
        **fields,
    )


def raises(problem):
    def fail(x):
        raise problem

    return fail


SHORT = RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes.")
FAULTS = {
    "right": (lambda x: 2 * x, "proved", ""),
    "rounded": (lambda x: 2.0005 * x, "proved", ""),
    "wrong scale": (lambda x: 2.04 * x, "declined", "of its norm, more than 0.01"),
    "one row": (lambda x: 2 * x.at[3].multiply(1.02), "proved", ""),
    "wrong row": (lambda x: 2 * x.at[3].multiply(1.04), "declined", "doubling: a row of out is"),
    "NaN": (lambda x: 2 * x.at[3, 3].set(jnp.nan), "declined", "off by inf"),
    "raises": (raises(ValueError("bad\ntiles")), "declined", "doubling: ValueError: bad"),
    "memory": (raises(SHORT), "undecided", "doubling: device memory was short (RESOURCE"),
}


@pytest.mark.catches("wrong-row-passes")
@pytest.mark.parametrize("name", FAULTS)
def test_values_are_held_to_the_truth(name):
    kernel, outcome, reason = FAULTS[name]
    found = prove([case(lambda x: 2 * x), case(kernel)])
    assert found.outcome == outcome
    assert found.reason.startswith(reason) or reason in found.reason


def test_a_truth_that_fails_says_nothing_of_the_kernel():
    broken = dataclasses.replace(case(lambda x: 2 * x), truth=raises(ValueError("no")))
    found = prove([broken])
    assert (found.outcome, found.reason) == ("undecided", "doubling: XLA, the truth, failed: no")


def test_the_truth_is_in_float32_at_the_highest_precision(monkeypatch):
    seen = []

    def truth(x):
        seen.append((x.dtype, trial.jax.config.jax_default_matmul_precision))
        return {"out": 2 * x}

    with trial.jax.default_matmul_precision("bfloat16"):
        prove([dataclasses.replace(case(lambda x: 2 * x), truth=truth)])
    assert seen == [(jnp.float32, "highest")]


def test_peers_that_run_are_timed_beside_the_kernel(monkeypatch):
    timed = {}

    def time_calls(functions, sets, effort):
        timed.update({name: function(*sets[0]) for name, function in functions.items()})
        return {name: [1.0, 2.0] for name in functions}

    monkeypatch.setattr(trial, "time_calls", time_calls)
    peers = {"cudnn": raises(ValueError("no plan")), "xla": lambda x: {"out": 3 * x}}
    found = prove([case(lambda x: 2 * x), case(lambda x: 2 * x, peers=peers)])
    assert found == proved((1.0, 2.0), xla=(1.0, 2.0))
    assert set(timed) == {"", "xla"}
    short = prove([case(lambda x: 2 * x, peers={"xla": raises(SHORT)})])
    assert short.outcome is Outcome.UNDECIDED
