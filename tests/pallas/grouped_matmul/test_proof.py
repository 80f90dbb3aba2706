"""The cases that grouped matmul's kernels are proved on."""

import dataclasses
import itertools
import types

import jax.numpy as jnp
import pytest

from colossax.pallas.grouped_matmul import api, xla
from colossax.pallas.grouped_matmul.mosaic_gpu import FEATURES, NARROW, WIDE, default_tiles
from colossax.pallas.grouped_matmul.proof import Sizes, trials, variants
from colossax.pallas.grouped_matmul.spec import GroupedSpec, GroupedVariant
from colossax.pallas.proof.trial import prove

SIZES = Sizes(small=(0, 9, 21, 1), behind=4, large=(24, 0, 8), large_features=(128, 256))
VARIANT = GroupedVariant(dtype="bfloat16", wide_in=False, wide_out=True)


def spec(d, f, dtype="bfloat16"):
    return GroupedSpec(rows=8, groups=2, features_in=d, features_out=f, dtype=jnp.dtype(dtype))


def test_a_variant_is_the_tiles_that_a_call_takes():
    for features in range(8, 1600, 8):
        padded = -(-features // FEATURES) * FEATURES
        tiles = default_tiles(padded)
        assert spec(features, 8).variant.wide_in is (tiles == WIDE)
        assert spec(8, features).variant.wide_out is (tiles != NARROW)
    sides, dtypes = (120, 248), ("bfloat16", "float16")
    asked = {spec(d, f, x).variant for d, f, x in itertools.product(sides, sides, dtypes)}
    assert asked == set(variants())


def test_the_sizes_are_those_of_the_variant():
    for features in (Sizes().small_features, Sizes().large_features):
        assert [spec(size, 8).variant.wide_in for size in features] == [False, True]


FAULTS = {
    "multiply": lambda out: out.at[12].set(0),
    "weight_gradient": lambda out: jnp.flip(out, 0),
}


@pytest.mark.parametrize("where", FAULTS)
def test_every_fault_is_found(where, monkeypatch):
    kernels = types.ModuleType("kernels")
    kernels.why_not, right = lambda spec, target: None, getattr(xla, where)
    kernels.multiply, kernels.weight_gradient = xla.multiply, xla.weight_gradient
    setattr(kernels, where, lambda *given, **how: FAULTS[where](right(*given, **how)))
    monkeypatch.setitem(api.IMPLEMENTATIONS, "mosaic", kernels)
    found = prove([next(trials(VARIANT, sizes=SIZES))])
    assert found.outcome == "declined"
    assert found.reason.startswith("uneven groups: ")


def test_right_kernels_are_proved_and_timed():
    found = prove(trials(VARIANT, kernel="xla", sizes=SIZES))
    assert (found.outcome, set(found.peers)) == ("proved", {"xla"})


@pytest.mark.sweep
def test_the_kernels_themselves_are_proved():
    """Interpreted: as slow as they are, nothing is timed."""
    for one in trials(VARIANT, kernel="interpret", sizes=SIZES):
        found = prove([dataclasses.replace(one, peers={})])
        assert (found.outcome, found.reason) == ("proved", "")
