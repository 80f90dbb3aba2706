"""Matmuls in float8 beside NumPy: formats to the bit, scales by hand, results and gradients."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from colossax.config import Float8, Plan, Precision
from colossax.sharding import Dense, linear, remembered, use
from colossax.sharding.matmul.float8 import FIRST, GRADIENT, INPUT, quantised, scale_of
from tests.cases import quick_first

FORMATS = {"e4m3": (INPUT, ml_dtypes.float8_e4m3fn), "e5m2": (GRADIENT, ml_dtypes.float8_e5m2)}


def thresholds(kind):
    """All numbers of a format, the middles between neighbours, and float32 beside each: a rounding
    never falls, so one that is right here is right everywhere."""
    every = np.arange(256, dtype=np.uint8).view(kind).astype(np.float64)
    every = np.unique(every[np.isfinite(every)])
    points = np.concatenate([every, (every[1:] + every[:-1]) / 2]).astype(np.float32)
    beside = [np.nextafter(points, np.float32(to)) for to in (np.inf, -np.inf)]
    return np.concatenate([points, *beside])


@pytest.mark.catches("float8-beyond-its-largest")
@pytest.mark.catches("float8-hides-infinity")
@pytest.mark.parametrize("name", FORMATS)
def test_numbers_are_rounded_to_the_bit_as_the_format_says(name):
    """Of float32 at every threshold, and of all numbers of 16 bits."""
    dtype, kind = FORMATS[name]
    top = float(ml_dtypes.finfo(kind).max)
    cast = jax.jit(lambda x: quantised(x, jnp.float32(1), dtype))
    bits = np.arange(2**16, dtype=np.uint16)
    for numbers in (thresholds(kind), bits.view(ml_dtypes.bfloat16), bits.view(np.float16)):
        wide = numbers.astype(np.float32)
        finite = np.isfinite(wide)
        want = np.where(finite, np.clip(wide, -top, top), np.nan).astype(kind)
        got = np.asarray(cast(numbers))
        np.testing.assert_array_equal(got[finite].view(np.uint8), want[finite].view(np.uint8))
        assert np.all(np.isnan(got[~finite].astype(np.float32)))


@pytest.mark.catches("float8-scale-of-nothing")
@pytest.mark.catches("float8-scale-too-large")
def test_a_scale_is_the_greatest_power_of_two_that_fits():
    largest = [448.0, 448.1, 224.0, 1.0, 1.75, 1.76, 3e38, 1e-30, 0.0, np.inf, np.nan, 2.0**-126]
    want = [1.0, 0.5, 2.0, 256.0, 256.0, 128.0, 2.0**-120, 2.0**108, 1.0, 1.0, 1.0, 2.0**126]
    got = [float(scale_of(jnp.float32(x), INPUT)) for x in largest]
    assert got == want
    assert float(scale_of(jnp.float32(57344), GRADIENT)) == 1
    for x in np.random.default_rng(0).lognormal(0, 20, 200).astype(np.float32):
        for dtype, _ in FORMATS.values():
            scaled = float(x) * float(scale_of(jnp.float32(x), dtype))
            assert float(jnp.finfo(dtype).max) / 2 < scaled <= float(jnp.finfo(dtype).max)


def rounded(x, kind, scale=None):
    """What a tensor becomes in a format and is then worth, in float64."""
    top = float(ml_dtypes.finfo(kind).max)
    largest = float(np.max(np.abs(x), initial=0))
    if scale is None:
        scale = 2.0 ** math.floor(math.log2(top / largest)) if largest else 1.0
    scaled = np.clip(np.asarray(x, np.float32) * np.float32(scale), -top, top)
    return scaled.astype(kind).astype(np.float64) / scale


def truth(x, w, b, dy, scales=(None, None, None)):
    """Result and gradients of x, w and b; `[tokens, in]`, `[in, out]`."""
    kinds = (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
    qx, qw, qdy = (rounded(*each) for each in zip((x, w, dy), kinds, scales, strict=True))
    return qx @ qw + b, qdy @ qw.T, qx.T @ qdy, dy.sum(0, dtype=np.float64)


def multiplied(x, w, b, dy, *, mesh=None, scaling="current", history=None, compute="float32"):
    """The same by `linear`; the weight's dims are `embed mlp`."""
    mesh = mesh or {"fsdp": 1}
    config = Precision(matmul="float8", compute=compute, float8=Float8(scaling=scaling))
    bound = Plan(mesh=mesh, precision=config).bind(jax.devices()[: math.prod(mesh.values())])

    def call(x, w, b, history):
        with use(bound):
            return linear(x, Dense(w, ("embed", "mlp"), history), bias=b)

    def both(x, w, b, history, dy):
        y, pull = jax.vjp(call, x, w, b, history)
        return y, *pull(dy.astype(y.dtype))

    return jax.jit(both)(x, w, b, history, dy)


def operands(tokens, inner, outer, seed=0):
    """Numbers of the sizes that training has, a few of them far out."""
    rng = np.random.default_rng(seed)
    x, w, b = (
        rng.normal(size=(tokens, inner)),
        rng.normal(size=(inner, outer)),
        rng.normal(size=outer),
    )
    x[0, 0], dy = 40.0, rng.standard_t(3, size=(tokens, outer))
    return tuple(a.astype(np.float32) for a in (x, w * 0.02, b, dy * 1e-6))


SIZES = [(24, 16, 32), (7, 5, 3), (1, 1, 1), (33, 47, 17)]


@pytest.mark.catches("float8-gradient-in-e4m3")
@pytest.mark.catches("float8-unscaled-by-another")
@pytest.mark.parametrize(("tokens", "inner", "outer"), quick_first(SIZES, [(7, 5, 3)]))
def test_results_and_gradients_are_those_of_numpy_of_any_size(tokens, inner, outer):
    given = operands(tokens, inner, outer)
    got, want = multiplied(*given), truth(*given)
    for found, expected in zip(got, want, strict=False):
        scale = np.max(np.abs(expected))
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * scale)


def test_in_bfloat16_results_are_those_rounded_once():
    """All that is rounded twice is the sum of a result and its bias."""
    x, w, b, dy = operands(16, 32, 24)
    narrow = ml_dtypes.bfloat16
    x, w, dy = (a.astype(narrow).astype(np.float32) for a in (x, w, dy))
    got, want = multiplied(x, w, b * 0, dy, compute="bfloat16"), truth(x, w, b * 0, dy)
    for found, expected in zip(got[:3], want[:3], strict=True):
        steps = np.abs(np.asarray(found, np.float64) - expected)
        np.testing.assert_array_less(steps, 2.0**-8 * np.abs(expected) + 1e-12 * np.max(expected))


MESHES = [{"data": 2}, {"fsdp": 8}, {"fsdp": 2, "tensor": 2}, {"ring": 2, "fsdp": 2}]


@pytest.mark.parametrize("mesh", quick_first(MESHES, [{"fsdp": 2, "tensor": 2}]))
def test_devices_scale_by_the_whole_tensor(mesh):
    """Of shards whose largest numbers lie a thousand times apart; only sums can differ."""
    x, w, b, dy = operands(8 * 4, 16, 8)
    x *= np.repeat(10.0 ** np.arange(-4, 4), 4)[:, None].astype(np.float32)
    w *= 10.0 ** np.linspace(-3, 0, 16)[:, None].astype(np.float32)
    x, dy = x.reshape(8, 4, 16), dy.reshape(8, 4, 8)
    got, want = multiplied(x, w, b, dy, mesh=mesh), multiplied(x, w, b, dy)
    for found, expected in zip(got[:4], want[:4], strict=True):
        scale = float(np.max(np.abs(expected)))
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * scale)


def test_nothing_but_zeros_gives_zeros_and_infinity_no_number():
    x, w, b, dy = operands(4, 6, 5)
    y, dx, dw, _, _ = multiplied(x * 0, w * 0, b, dy * 0)
    np.testing.assert_array_equal(y, np.broadcast_to(b, (4, 5)))
    assert not np.any(dx) and not np.any(dw)
    x[2, 3] = np.inf
    y = np.asarray(multiplied(x, w, b, dy)[0])
    assert np.all(np.isnan(y[2])) and np.all(np.isfinite(np.delete(y, 2, axis=0)))


@pytest.mark.catches("float8-history-not-read")
@pytest.mark.catches("float8-notes-nothing")
def test_delayed_scales_are_of_the_history_and_what_is_met_is_noted():
    """An input twice as large as any before is cut to the largest number of the format."""
    x, w, b, dy = operands(6, 8, 4)
    history = np.zeros((3, 4), np.float32)
    history[:, 1:3] = [[20.0, 10.0], [0.1, 0.05], [1e-5, 2e-5]]
    got = multiplied(x, w, b, dy, scaling="delayed", history=history)
    scales = [2.0**4, 2.0**12, 2.0**31]
    assert [448 / 20, 448 / 0.1, 57344 / 2e-5] < [2 * s for s in scales]
    for found, expected in zip(got, truth(x, w, b, dy, scales), strict=False):
        np.testing.assert_allclose(
            found, expected, rtol=0, atol=2e-6 * float(np.max(np.abs(expected)))
        )
    noted = np.asarray(got[4])
    np.testing.assert_array_equal(noted[:, 0], [np.max(np.abs(a)) for a in (x, w, dy)])
    assert not np.any(noted[:, 1:])


def test_an_empty_history_counts_as_numbers_that_are_usual():
    given = operands(6, 8, 4)
    empty = np.zeros((3, 4), np.float32)
    full = np.tile(np.float32(FIRST)[:, None], (1, 4))
    got, want = (multiplied(*given, scaling="delayed", history=h) for h in (empty, full))
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.catches("float8-history-forgets")
def test_a_history_has_the_newest_first_and_loses_the_oldest():
    history, noted = np.arange(9, dtype=np.float32).reshape(3, 3), np.zeros((3, 3), np.float32)
    noted[:, 0] = [10, 20, 30]
    want = [[10, 0, 1], [20, 3, 4], [30, 6, 7]]
    np.testing.assert_array_equal(remembered(jnp.array(history), jnp.array(noted)), want)
