"""Matmuls with N:M sparse weights: the plain form and the kernel against float64."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.pallas.narrow.proof import Sizes
from colossax.pallas.sparse_matmul import (
    SparseSpec,
    api,
    choose,
    mosaic_gpu,
    sparse_matmul,
    variants,
)
from colossax.pallas.sparse_matmul.proof import trials
from colossax.pallas.sparse_matmul.spec import SparseVariant
from tests.pallas.narrow import declines, error, right_is_proved_and_wrong_is_not
from tests.pallas.places import everywhere, no_races

pytestmark = pytest.mark.slow

USUAL = SparseSpec(rows=3, inputs=256, outputs=128, dtype=jnp.dtype("bfloat16"), kept=2)


def operands(m, k, n, kept, dtype=jnp.bfloat16):
    """Rows, values, places; and the product in float64, of a matrix filled one by one."""
    rng = np.random.default_rng(0)
    x, values = (
        np.asarray(jnp.asarray(rng.normal(size=size), dtype), np.float64)
        for size in ((m, k), (kept, n, k // 4))
    )
    index, w = np.zeros((kept, n, k // 4), np.int8), np.zeros((k, n))
    for column, four in np.ndindex(n, k // 4):
        index[:, column, four] = places = np.sort(rng.choice(4, kept, replace=False))
        w[4 * four + places, column] = values[:, column, four]
    return jnp.asarray(x, dtype), jnp.asarray(values, dtype), jnp.asarray(index), x @ w


@pytest.mark.parametrize("kept", [1, 2])
def test_the_plain_form_is_what_is_written_down(kept):
    *given, want = operands(3, 64, 24, kept, jnp.float32)
    assert error(jax.jit(sparse_matmul)(*given), want) < 1e-6


@everywhere
@pytest.mark.catches("sparse-places-in-another-order")
@pytest.mark.catches("sparse-second-value-left-out")
@pytest.mark.parametrize(
    ("m", "k", "n", "kept", "parts"),
    [
        (5, 1280, 128, 2, 1),
        (8, 512, 128, 1, 2),
        pytest.param(32, 1280, 256, 1, 2, marks=pytest.mark.sweep),
        pytest.param(17, 1280, 256, 2, 3, marks=pytest.mark.sweep),
    ],
)
def test_the_kernel_is_what_is_written_down(m, k, n, kept, parts, place):
    """More steps than stages; parts that have fewer steps than others."""
    *given, want = operands(m, k, n, kept)
    how = {"parts": parts, "interpret": place == "interpret"}
    found = jax.jit(functools.partial(mosaic_gpu.multiply, **how))(*given)
    assert error(found, want) < 1e-5
    assert no_races(place)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": jnp.dtype("float16")}, "the kernel takes bfloat16, found float16"),
        ({"rows": 33}, "33 rows; the kernel takes 32"),
        ({"inputs": 384}, "384 inputs are no multiple of 256"),
        ({"outputs": 192}, "192 outputs are no multiple of 128"),
        ({"checked": True}, "give check_vma=False"),
    ],
)
def test_what_the_kernel_declines(changes, reason):
    spec = dataclasses.replace(USUAL, **changes)
    declines("sparse_matmul", choose, USUAL, spec, reason)


def test_every_number_of_rows_is_a_variant():
    kinds = itertools.product(range(1, 33), (1, 2))
    asked = {dataclasses.replace(USUAL, rows=m, kept=kept).variant for m, kept in kinds}
    assert asked == set(variants())


BAD = {
    "inputs": ((2, 192), (1, 8, 64), (1, 8, 64), jnp.int8, "do not fit; they are"),
    "kept": ((2, 256), (3, 8, 64), (3, 8, 64), jnp.int8, r"twice \[1 or 2, n, k / 4\]"),
    "places": ((2, 256), (2, 8, 64), (1, 8, 64), jnp.int8, "do not fit; they are"),
    "rows": ((0, 256), (1, 8, 64), (1, 8, 64), jnp.int8, "no dim may be 0"),
    "dtype": ((2, 256), (1, 8, 64), (1, 8, 64), jnp.int32, "index of int32; give int8"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused(name):
    x, values, index, dtype, said = BAD[name]
    # Annotations are checked in tests only; what a user sees is behind them.
    with pytest.raises(ValueError, match=said):
        sparse_matmul.__wrapped__(jnp.zeros(x), jnp.zeros(values), jnp.zeros(index, dtype))


SIZES = Sizes(small=(256, 128), large=(512, 256))


@pytest.mark.parametrize("kept", [1, 2])
def test_a_right_kernel_is_proved_and_a_wrong_one_is_not(kept, monkeypatch):
    variant = SparseVariant(rows=8, kept=kept)
    right_is_proved_and_wrong_is_not(trials, variant, SIZES, api.IMPLEMENTATIONS, monkeypatch)
