"""Adafactor and CAME against what their papers say, in float64, and against Optax's."""

import jax
import numpy as np
import optax
import pytest

from colossax.errors import InputError
from colossax.optim import adafactor, came
from tests.optim.table import DIMS, STEPS, assert_close, run, unit

SPLIT_DIMS = {"w": ("embed", "heads", "head_dim")}


def rms(x):
    return np.sqrt(np.mean(np.square(x)))


def product(rows, cols):
    """Of `rows` `[r]` and `cols` `[c]`: what stands for the matrix."""
    return np.outer(rows, cols) / rows.mean()


class Adafactor:
    """One parameter, a matrix or a vector."""

    def __init__(self, w, momentum=None, least_scale=1e-3):
        self.w, self.momentum, self.least_scale = w.astype(np.float64), momentum, least_scale
        self.rows, self.cols = np.zeros(w.shape[0]), np.zeros(w.shape[-1])
        self.full, self.mean = np.zeros(w.shape), np.zeros(w.shape)

    def step(self, at, g, rate, decay=0.0):
        keep, g = 1 - at**-0.8, g.astype(np.float64)
        square = g**2 + 1e-30
        if self.w.ndim == 2:
            self.rows = keep * self.rows + (1 - keep) * square.mean(1)
            self.cols = keep * self.cols + (1 - keep) * square.mean(0)
            self.full = product(self.rows, self.cols)
        else:
            self.full = keep * self.full + (1 - keep) * square
        u = g / np.sqrt(self.full)
        u /= max(1.0, rms(u))
        if self.momentum is not None:
            self.mean = u = self.momentum * self.mean + (1 - self.momentum) * u
        size = 1.0 if self.least_scale is None else max(self.least_scale, rms(self.w))
        self.w = self.w - rate * (size * u + (decay * self.w if self.w.ndim == 2 else 0))


class Came:
    """One parameter, a matrix or a vector."""

    def __init__(self, w):
        self.w = w.astype(np.float64)
        self.rows, self.cols = np.zeros(w.shape[0]), np.zeros(w.shape[-1])
        self.far_rows, self.far_cols = np.zeros(w.shape[0]), np.zeros(w.shape[-1])
        self.full, self.mean = np.zeros(w.shape), np.zeros(w.shape)

    def step(self, at, g, rate, decay=0.0):
        g = g.astype(np.float64)
        square = g**2 + 1e-30
        if self.w.ndim == 2:
            self.rows = 0.999 * self.rows + 0.001 * square.mean(1)
            self.cols = 0.999 * self.cols + 0.001 * square.mean(0)
            self.full = product(self.rows, self.cols)
        else:
            self.full = 0.999 * self.full + 0.001 * square
        u = g / np.sqrt(self.full)
        u /= max(1.0, rms(u))
        self.mean = moved = 0.9 * self.mean + 0.1 * u
        if self.w.ndim == 2:
            far = (u - self.mean) ** 2 + 1e-16
            self.far_rows = 0.9999 * self.far_rows + 0.0001 * far.mean(1)
            self.far_cols = 0.9999 * self.far_cols + 0.0001 * far.mean(0)
            moved = self.mean / np.sqrt(product(self.far_rows, self.far_cols))
            moved = moved + decay * self.w
        self.w = self.w - rate * moved


CASES = {
    "adafactor": (lambda w: Adafactor(w), adafactor(0.1, weight_decay=0.2)),
    "adafactor, mean and no sizes": (
        lambda w: Adafactor(w, 0.9, None),
        adafactor(0.1, momentum=0.9, least_scale=None, weight_decay=0.2),
    ),
    "came": (Came, came(0.1, weight_decay=0.2)),
}


@pytest.mark.catches("adafactor-clip")
@pytest.mark.catches("adafactor-scale")
@pytest.mark.catches("came-distance")
@pytest.mark.parametrize("name", CASES)
def test_equals_what_its_paper_says(name):
    plain, make = CASES[name]
    gradients = [unit(1, 0, seed) for seed in range(1, 1 + STEPS)]
    found, _ = run(make(DIMS), unit(0, 0, 0), gradients)
    wanted = {key: plain(w) for key, w in unit(0, 0, 0).items()}
    for at, grads in enumerate(gradients, 1):
        for key, parameter in wanted.items():
            parameter.step(at, grads[key], 0.1, 0.2)
    assert_close(found, {key: parameter.w for key, parameter in wanted.items()}, rtol=5e-6)


def test_adafactor_is_that_of_optax_on_what_is_not_stacked():
    gradients = [unit(1, 0, seed) for seed in range(1, 1 + STEPS)]
    theirs = optax.adafactor(0.1, min_dim_size_to_factor=1)
    found, _ = run(adafactor(0.1)(DIMS), unit(0, 0, 0), gradients)
    wanted, _ = run(theirs, unit(0, 0, 0), gradients)
    assert_close(found, wanted, rtol=2e-6)


def test_optax_would_mix_the_layers_of_a_stack():
    """The contract of the table can fail: of two layers of 8 x 1 its sides are 2 and 8."""
    layers = [unit(at, 0, 0)["w"][:, :1] for at in range(2)]
    grads = [unit(at, 0, 1)["w"][:, :1] for at in range(2)]
    optimizer = optax.adafactor(0.1, min_dim_size_to_factor=1)
    together, _ = run(optimizer, np.stack(layers), [np.stack(grads)])
    apart = [run(optimizer, w, [g])[0] for w, g in zip(layers, grads, strict=True)]
    assert abs(np.stack(apart) - together).max() > 1e-3


@pytest.mark.parametrize("make", [adafactor(0.1), came(0.1)])
def test_heads_are_columns_however_they_are_cut(make):
    w, gradients = unit(0, 0, 0)["w"], [unit(1, 0, seed)["w"] for seed in range(1, 4)]
    whole, _ = run(make({"w": DIMS["w"]}), {"w": w}, [{"w": g} for g in gradients])
    cut, state = run(
        make(SPLIT_DIMS), {"w": w.reshape(8, 4, 4)}, [{"w": g.reshape(8, 4, 4)} for g in gradients]
    )
    assert_close({"w": cut["w"].reshape(8, 16)}, whole, rtol=2e-6)
    shapes = {leaf.shape for leaf in jax.tree.leaves(state) if leaf.ndim}
    assert shapes - {(8, 4, 4)} == {(8, 1, 1), (1, 4, 4)}


@pytest.mark.parametrize("make", [adafactor(0.1), came(0.1)])
def test_what_has_no_gradient_stays(make):
    """Rows that no token reads, and parameters without any gradient: no division of 0 by 0."""
    w = unit(0, 0, 0)["w"]
    some = unit(1, 0, 1)["w"].copy()
    some[3] = 0
    found, _ = run(
        make({"some": DIMS["w"], "none": DIMS["w"]}),
        {"some": w, "none": w},
        [{"some": some, "none": 0 * some}] * 3,
    )
    np.testing.assert_array_equal(found["none"], w)
    np.testing.assert_array_equal(found["some"][3], w[3])
    assert np.all(np.isfinite(found["some"])) and not np.any(found["some"][2] == w[2])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: adafactor(0.1, clip=0.0), "adafactor: clip: found 0.0; give a number above 0"),
        (lambda: adafactor(0.1, momentum=1.0), "adafactor: momentum: found 1.0; give 0 or more"),
        (lambda: adafactor(-0.1), "adafactor: learning_rate: found -0.1; give 0 or more"),
        (lambda: adafactor(0.1, least_scale=-1.0), "adafactor: least_scale: found -1.0; give 0"),
        (lambda: came(0.1, b3=1.0), "came: b3: found 1.0; give 0 or more, below 1"),
        (lambda: came(0.1, eps=0.0), "came: eps: found 0.0; give a number above 0"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(InputError, match=message):
        make()
