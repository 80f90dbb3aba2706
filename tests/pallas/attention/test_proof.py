"""The cases that attention's kernels are proved on find faults of every kind, and no others."""

import dataclasses
import functools
import itertools
import types

import jax
import jax.numpy as jnp
import pytest

from colossax.pallas.attention import Mask, api, block, xla
from colossax.pallas.attention.mosaic_gpu.attend import why_not_call
from colossax.pallas.attention.mosaic_gpu.shapes import HEAD_SIZES
from colossax.pallas.attention.proof import Sizes, trials, variants
from colossax.pallas.attention.spec import AttentionSpec, AttentionVariant
from colossax.pallas.proof import trial
from colossax.pallas.proof.trial import prove

SIZES = Sizes(small=40, tokens=48, heads=2)
PLAIN = AttentionVariant(head_dim=64, v_head_dim=64, dtype="bfloat16")
BIASED = dataclasses.replace(PLAIN, bias="float32", soft_cap=True, dtype="float16")
STEPS = dataclasses.replace(PLAIN, block=True)
KINDS = {"plain": PLAIN, "biased": BIASED, "steps": STEPS}


def test_variants_are_what_calls_ask_for():
    every = set(variants())
    asked = set()
    bools = (False, True)
    for (h, hv), dtype, soft_cap, steps in itertools.product(
        HEAD_SIZES, ("bfloat16", "float16"), bools, bools
    ):
        for bias in ("",) if steps else ("", "float32", dtype):
            shape = jax.ShapeDtypeStruct((1, 1, 8, 8), bias or dtype)
            spec = AttentionSpec(
                batch=1,
                q_length=8,
                kv_length=8,
                heads=2,
                kv_heads=1,
                head_dim=h,
                v_head_dim=hv,
                dtype=jnp.dtype(dtype),
                mask=Mask(),
                biases=(shape,) if bias else (),
                soft_cap=soft_cap,
                block=steps,
            )
            assert why_not_call(spec) is None
            asked.add(spec.variant)
    assert asked == every
    assert len({str(one) for one in every}) == len(every)


@pytest.fixture(scope="module")
def truths():
    """By kind, so that each is computed once."""
    compute = trial._truth
    return functools.cache(lambda kind: compute(next(trials(KINDS[kind], sizes=SIZES))))


def changed(**changes):
    def change(operands, scoring, given):
        mask = dataclasses.replace(operands.mask, **changes)
        return operands.replace(mask=mask), scoring, given

    return change


def no_soft_cap(operands, scoring, given):
    return operands, scoring.replace(soft_cap=None), given


def bias_of_one_head(operands, scoring, given):
    (bias,) = scoring.biases
    biases = (jnp.broadcast_to(bias[:, :1], bias.shape),)
    return operands, scoring.replace(biases=biases), given


def nothing_carried(operands, scoring, given):
    return operands, scoring, {**given, "carried": None}


def turned(operands, scoring, given):
    """The log-partition near 0 that is carried has lost its sign."""
    carried = given.get("carried")
    if carried is not None:
        given = {**given, "carried": (carried[0], -carried[1])}
    return operands, scoring, given


def a_row_of(index):
    """One of a function's results has a row of one head that is a tenth off."""

    def change(found):
        off = found[index].at[1, 7, 0].multiply(1.1)
        return (*found[:index], off, *found[index + 1 :])

    return change


def a_row_of_gradient(name):
    """Likewise the gradient of one of the operands."""

    def change(found):
        off = getattr(found[0], name).at[1, 7, 0].multiply(1.1)
        return found[0].replace(**{name: off}), found[1]

    return change


def as_given(*given):
    return given


def same(found):
    return found


def case(kind, where, before=as_given, after=same, *, quick=False):
    """A fault before or behind one function of the kernels."""
    return pytest.param(kind, where, before, after, marks=() if quick else pytest.mark.sweep)


FAULTS = {
    "no window": case("plain", "attend", changed(window=None), quick=True),
    "a narrower window": case("plain", "attend", changed(window=(12, None))),
    "documents in one": case("plain", "attend", changed(q_segments=None, kv_segments=None)),
    "places ignored": case("plain", "attend", changed(q_positions=None, kv_positions=None)),
    "a row of the output": case("plain", "attend", after=a_row_of(0), quick=True),
    "log-partition": case("plain", "attend", after=lambda found: (found[0], found[1] + 0.1)),
    "no soft cap": case("biased", "attend", no_soft_cap),
    "bias of one head": case("biased", "attend", bias_of_one_head, quick=True),
    "nothing carried": case("steps", "attend_block", nothing_carried),
    "its sign lost": case("steps", "attend_block", turned, quick=True),
    "a row of dq": case("steps", "block_gradients", after=a_row_of_gradient("q")),
    "a row of dv": case("steps", "block_gradients", after=a_row_of_gradient("v"), quick=True),
}


@pytest.mark.parametrize("kind, where, before, after", FAULTS.values(), ids=FAULTS)
def test_every_fault_is_found(kind, where, before, after, truths, monkeypatch):
    kernels = types.ModuleType("kernels")
    kernels.why_not = lambda spec, target: None
    for each in ("attend", "attend_block", "block_gradients"):
        setattr(kernels, each, getattr(xla, each))
    right = getattr(xla, where)

    def faulty(operands, scoring, **given):
        operands, scoring, given = before(operands, scoring, given)
        return after(right(operands, scoring, **given))

    setattr(kernels, where, faulty)
    monkeypatch.setitem(api.IMPLEMENTATIONS, "mosaic", kernels)
    monkeypatch.setitem(block._FORMS, "mosaic", kernels)
    monkeypatch.setattr(trial, "_truth", lambda one: truths(kind))
    found = prove([next(trials(KINDS[kind], sizes=SIZES))])
    assert found.outcome == "declined"
    assert " is off by " in found.reason


@pytest.mark.parametrize("kind", KINDS)
def test_right_kernels_are_proved_and_timed(kind):
    found = prove(trials(KINDS[kind], kernel="xla", sizes=SIZES))
    assert (found.outcome, found.reason) == ("proved", "")
    assert set(found.peers) == {"xla"}


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_themselves_are_proved(kind):
    """Interpreted: as slow as they are, nothing is timed."""
    for one in trials(KINDS[kind], kernel="interpret", sizes=SIZES):
        found = prove([dataclasses.replace(one, peers={})])
        assert (found.outcome, found.reason) == ("proved", "")
