"""Matmuls with weights of four bits: the plain form and the kernel against float64."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.pallas.int4_matmul import (
    Int4Spec,
    api,
    choose,
    int4_matmul,
    mosaic_gpu,
    variants,
)
from colossax.pallas.int4_matmul.proof import trials
from colossax.pallas.int4_matmul.spec import Int4Variant
from colossax.pallas.narrow.proof import Sizes
from tests.pallas.narrow import declines, error, right_is_proved_and_wrong_is_not
from tests.pallas.places import everywhere, no_races

pytestmark = pytest.mark.slow

USUAL = Int4Spec(rows=3, inputs=256, outputs=128, dtype=jnp.dtype("bfloat16"), zeros=True)


def operands(m, k, n, zeros, dtype=jnp.bfloat16, of_scales=None):
    """Rows, codes two a byte, scales, zeros or None; and the product in float64."""
    rng = np.random.default_rng(0)
    x = np.asarray(jnp.asarray(rng.normal(size=(m, k)), dtype), np.float64)
    numbers = rng.integers(0, 16, (k, n))
    kind = of_scales or dtype
    scales = np.asarray(jnp.asarray(rng.uniform(0.5, 2, (k // 128, n)), kind), np.float64)
    of_zero = rng.integers(0, 16, (k // 128, n)) if zeros else np.full((k // 128, n), 8)
    w = np.zeros((k, n))
    for i in range(k):
        w[i] = (numbers[i] - of_zero[i // 128]) * scales[i // 128]
    codes = np.asarray([numbers[2 * i] + 16 * numbers[2 * i + 1] for i in range(k // 2)], np.uint8)
    given = (jnp.asarray(x, dtype), jnp.asarray(codes), jnp.asarray(scales, kind))
    return *given, jnp.asarray(of_zero, jnp.uint8) if zeros else None, x @ w


@pytest.mark.catches("int4-odd-first")
@pytest.mark.parametrize("zeros", [False, True])
def test_the_plain_form_is_what_is_written_down(zeros):
    *given, want = operands(3, 256, 24, zeros, jnp.float32)
    assert error(jax.jit(int4_matmul)(*given), want) < 1e-6


@everywhere
@pytest.mark.catches("int4-halves")
@pytest.mark.catches("int4-zeros")
@pytest.mark.parametrize(
    ("m", "k", "n", "zeros", "parts"),
    [
        (5, 768, 128, True, 2),
        pytest.param(32, 1280, 256, False, 4, marks=pytest.mark.sweep),
        pytest.param(8, 128, 128, True, 1, marks=pytest.mark.sweep),
    ],
)
def test_the_kernel_is_what_is_written_down(m, k, n, zeros, parts, place):
    """More groups than stages; parts that have fewer groups than others."""
    *given, want = operands(m, k, n, zeros)
    how = {"parts": parts, "interpret": place == "interpret"}
    found = jax.jit(functools.partial(mosaic_gpu.multiply, **how))(*given)
    assert error(found, want) < 1e-5
    assert no_races(place)


@everywhere
@pytest.mark.catches("int4-scales-of-one-type")
def test_scales_of_float16_are_not_rounded(place):
    *given, want = operands(5, 256, 128, True, of_scales=jnp.float16)
    how = {"parts": 1, "interpret": place == "interpret"}
    found = jax.jit(functools.partial(mosaic_gpu.multiply, **how))(*given)
    assert error(found, want) < 1e-5
    assert no_races(place)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": jnp.dtype("float16")}, "the kernel takes bfloat16, found float16"),
        ({"rows": 33}, "33 rows; the kernel takes 32"),
        ({"outputs": 192}, "192 outputs are no multiple of 128"),
        ({"checked": True}, "give check_vma=False"),
    ],
)
def test_what_the_kernel_declines(changes, reason):
    spec = dataclasses.replace(USUAL, **changes)
    declines("int4_matmul", choose, USUAL, spec, reason)


def test_every_number_of_rows_is_a_variant():
    kinds = itertools.product(range(1, 33), (False, True))
    asked = {dataclasses.replace(USUAL, rows=m, zeros=z).variant for m, z in kinds}
    assert asked == set(variants())


BAD = {
    "inputs": (((2, 192), (96, 8), (1, 8)), jnp.uint8, None, "k a multiple of 128"),
    "codes": (((2, 256), (256, 8), (2, 8)), jnp.uint8, None, "do not fit; they are"),
    "scales": (((2, 256), (128, 8), (1, 8)), jnp.uint8, None, "do not fit; they are"),
    "rows": (((0, 256), (128, 8), (2, 8)), jnp.uint8, None, "no dim may be 0"),
    "dtype": (((2, 256), (128, 8), (2, 8)), jnp.int8, None, "codes of int8; give uint8"),
    "zeros": (((2, 256), (128, 8), (2, 8)), jnp.uint8, (1, 8), r"zeros \(1, 8\) of uint8; give"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused(name):
    (x, codes, scales), dtype, zeros, said = BAD[name]
    zeros = None if zeros is None else jnp.zeros(zeros, jnp.uint8)
    # Annotations are checked in tests only; what a user sees is behind them.
    with pytest.raises(ValueError, match=said):
        int4_matmul.__wrapped__(jnp.zeros(x), jnp.zeros(codes, dtype), jnp.zeros(scales), zeros)


SIZES = Sizes(small=(256, 128), large=(384, 256))


@pytest.mark.parametrize("zeros", [False, True])
def test_a_right_kernel_is_proved_and_a_wrong_one_is_not(zeros, monkeypatch):
    variant = Int4Variant(rows=8, zeros=zeros)
    right_is_proved_and_wrong_is_not(trials, variant, SIZES, api.IMPLEMENTATIONS, monkeypatch)
