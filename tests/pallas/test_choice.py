"""The first implementation that accepts, or every reason why none does."""

import logging
import types

import pytest

from colossax.pallas.choice import choose
from colossax.pallas.target import Target

CPU = Target(platform="cpu")


def implementation(reason):
    found = types.ModuleType("implementation")
    found.why_not = lambda spec, target: reason and f"{reason} for {spec} on {target.platform}"
    return found


SOME = {"fast": implementation("not made"), "slow": implementation(None)}
NONE = {"fast": implementation("not made"), "slow": implementation("too slow")}


def test_auto_takes_the_first_that_accepts_and_says_so_once(caplog):
    with caplog.at_level(logging.INFO, "colossax.pallas.choice"):
        assert choose("fold", SOME, "paper", CPU) == "slow"
        assert choose("fold", SOME, "paper", CPU) == "slow"
    (said,) = (record.getMessage() for record in caplog.records)
    assert said == "fold uses slow (not fast: not made for paper on cpu)"


def test_a_name_is_honoured_or_refused():
    assert choose("cut", SOME, "paper", CPU, "slow") == "slow"
    with pytest.raises(NotImplementedError, match="^cut 'fast': not made for paper on cpu$"):
        choose("cut", SOME, "paper", CPU, "fast")
    with pytest.raises(ValueError, match=r"cut: no implementation 'exact'; use one of .*'slow'"):
        choose("cut", SOME, "paper", CPU, "exact")


def test_all_reasons_are_told_when_none_accepts():
    with pytest.raises(ExceptionGroup, match="cut: no implementation takes this call") as found:
        choose("cut", NONE, "paper", CPU)
    reasons = [str(problem) for problem in found.value.exceptions]
    assert reasons == [
        "cut 'fast': not made for paper on cpu",
        "cut 'slow': too slow for paper on cpu",
    ]
