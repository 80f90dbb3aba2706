"""Moments in eight bits: the codes, blocks that no mesh or stack changes, and the whole rule."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from colossax.errors import InputError
from colossax.optim import adamw_8bit
from colossax.optim.quantised import block_of, dequantised, dynamic_codes, quantised
from tests.optim.table import STEPS, draw, run

W = ("embed", "mlp")


def test_codes_are_those_of_the_paper():
    signed, positive = dynamic_codes(signed=True), dynamic_codes(signed=False)
    assert len(set(signed)) == len(set(positive)) == 256
    assert {0.0, 1.0} <= set(signed) and positive.min() == 0.0
    for decade in range(7):
        low, high = 10.0 ** (decade - 7), 10.0 ** (decade - 6)
        for table, count in ((signed, 2**decade), (positive, 2 ** (decade + 1))):
            inside = table[(table > low) & (table < high)]
            assert len(inside) == count
            np.testing.assert_allclose(inside.mean(), (low + high) / 2, rtol=1e-6)


@pytest.mark.catches("eight-bits-nearest")
@pytest.mark.parametrize("signed", [True, False])
def test_each_number_takes_the_nearest_code_of_its_block(signed):
    x = draw(0, (6, 4, 32)) * 10.0 ** draw(1, (6, 4, 32))
    x = x if signed else np.abs(x)
    codes, scale = quantised(jnp.asarray(x), 2, 16, signed=signed)
    assert (codes.shape, codes.dtype, scale.shape) == (x.shape, jnp.uint8, (6, 4, 2))
    found = np.asarray(dequantised(codes, scale, 2, signed=signed))
    table = dynamic_codes(signed=signed).astype(np.float64)
    for row, col, block in itertools.product(range(6), range(4), range(2)):
        part = slice(16 * block, 16 * block + 16)
        numbers = x[row, col, part]
        largest = np.abs(numbers).max()
        np.testing.assert_allclose(scale[row, col, block], largest)
        best = np.abs(numbers[:, None] / largest - table).min(1)
        error = np.abs(numbers - found[row, col, part]) / largest
        np.testing.assert_allclose(error, best, atol=1e-6)


def test_zeros_stay_zeros():
    for signed in (True, False):
        codes, scale = quantised(jnp.zeros((2, 32)), 1, 16, signed=signed)
        np.testing.assert_array_equal(dequantised(codes, scale, 1, signed=signed), 0.0)


@pytest.mark.parametrize(
    ("dims", "shape", "expected"),
    [
        (W, (4096, 11008), (1, 256)),
        (("layers", *W), (32, 4096, 11008), (2, 256)),
        (("layers", "experts", *W), (256, 256, 64, 128), (3, 128)),
        (("embed", "heads", "head_dim"), (4096, 32, 128), (0, 256)),
        (("heads", "head_dim", "embed"), (32, 128, 4096), (2, 256)),
        (("vocab", "embed"), (50257, 768), (1, 256)),
        (("embed", "vocab"), (768, 50257), (0, 256)),
        (W, (17, 13), (0, 17)),
        (W, (13, 7), None),
        (("layers", "embed"), (32, 4096), None),
        (("heads", "head_dim"), (32, 128), None),
    ],
)
def test_blocks_are_of_a_dim_that_they_divide(dims, shape, expected):
    assert block_of(dims, shape) == expected


def test_equals_what_its_paper_says():
    """In float64 but for the scales and codes, which are what is kept."""
    w, gradients = draw(0, (8, 32)), [draw(seed, (8, 32)) for seed in range(1, 1 + STEPS)]
    make = adamw_8bit(0.1, weight_decay=0.2)
    found, _ = run(make({"w": W}), {"w": w}, [{"w": g} for g in gradients])
    kept = {True: np.zeros(w.shape), False: np.zeros(w.shape)}
    w = w.astype(np.float64)
    for at, g in enumerate(gradients, 1):
        m = 0.9 * kept[True] + 0.1 * g.astype(np.float64)
        v = 0.95 * kept[False] + 0.05 * g.astype(np.float64) ** 2
        step = m / (1 - 0.9**at) / (np.sqrt(v / (1 - 0.95**at)) + 1e-8)
        w = w - 0.1 * (step + 0.2 * w)
        kept = {signed: kept_as(x, signed) for signed, x in ((True, m), (False, v))}
    np.testing.assert_allclose(found["w"], w, rtol=1e-5, atol=1e-5)


def kept_as(x, signed):
    """Each number as the code nearest to it, of its row's largest."""
    table = dynamic_codes(signed=signed).astype(np.float64)
    scale = np.abs(x).max(1, keepdims=True)
    return table[np.abs((x / scale)[..., None] - table).argmin(-1)] * scale


def test_refusals():
    with pytest.raises(InputError, match="adamw_8bit: b2: found 1.0; give 0 or more, below 1"):
        adamw_8bit(0.1, b2=1.0)
    with pytest.raises(InputError, match="adamw_8bit: eps: found 0.0; give a number above 0"):
        adamw_8bit(0.1, eps=0.0)
