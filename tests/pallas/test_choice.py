"""The first implementation that accepts, or every reason why none does."""

import logging
import types

import jax.numpy as jnp
import pytest

from colossax.pallas.attention import Mask, attention
from colossax.pallas.choice import choose
from colossax.pallas.grouped_matmul import grouped_matmul
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
        assert choose("fold", SOME, "cloth", CPU) == "slow"
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "fold of paper: slow (not fast: not made for paper on cpu)",
        "fold of cloth: slow (not fast: not made for cloth on cpu)",
    ]


def test_an_interpreter_runs_only_if_named():
    both = {"interpret": implementation(None), "slow": implementation(None)}
    assert choose("fold", both, "paper", CPU) == "slow"
    assert choose("fold", both, "paper", CPU, "interpret") == "interpret"


def test_a_log_names_the_call(caplog):
    """Attention and grouped matmul say for which shapes they chose."""
    q = jnp.ones((2, 48, 4, 8))
    segments = jnp.zeros((1, 48), jnp.int32)
    mask = Mask(causal=True, window=(7, 0), q_segments=segments, kv_segments=segments)
    with caplog.at_level(logging.INFO, "colossax.pallas.choice"):
        attention(q, q[:, :, :2], q[:, :, :2], mask=mask, soft_cap=3.0)
        grouped_matmul(jnp.ones((48, 8)), jnp.ones((3, 8, 16)), jnp.asarray([16, 0, 32]))
    said = [record.getMessage().split(" (")[0] for record in caplog.records]
    assert said[0].startswith("attention of 2 x 48 x 48, 4/2 heads of 8, float32, causal, window")
    assert "grouped_matmul of 48 x 8 x 16 in 3 groups, float32: xla" in said[1]


@pytest.mark.catches("named-implementation")
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
