"""What tests of kernels for narrow weights share."""

import types

import numpy as np
import pytest

from colossax.pallas import Target
from colossax.pallas.proof.trial import prove

HOPPER = Target(platform="gpu", compute_capability=(9, 0))


def error(found, want):
    """Distance as a share of what is wanted."""
    return np.linalg.norm(np.asarray(found, np.float64) - want) / np.linalg.norm(want)


def declines(operation, choose, usual, spec, reason):
    """The kernel takes what is usual and not this, on a GPU and interpreted, and says why."""
    assert (choose(usual, HOPPER), choose(spec, HOPPER)) == ("mosaic", "xla")
    for name, where in (("mosaic", HOPPER), ("interpret", Target(platform="cpu"))):
        with pytest.raises(NotImplementedError, match=f"{operation} '{name}': .*{reason}"):
            choose(spec, where, name)


def right_is_proved_and_wrong_is_not(trials, variant, sizes, implementations, monkeypatch):
    """The plain form in the kernel's place, and one whose third row is 0."""
    found = prove(trials(variant, kernel="xla", sizes=sizes))
    assert (found.outcome, set(found.peers)) == ("proved", {"xla"})
    wrong = types.ModuleType("kernels")
    wrong.why_not = lambda spec, target: None
    multiply = implementations["xla"].multiply
    wrong.multiply = lambda *given: multiply(*given).at[2].set(0)
    monkeypatch.setitem(implementations, "mosaic", wrong)
    found = prove(trials(variant, sizes=sizes))
    assert found.outcome == "declined" and "out is off by" in found.reason
