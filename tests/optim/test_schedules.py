"""Schedules at their corners, eagerly and traced."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from colossax.errors import InputError
from colossax.optim import constant, inverse_sqrt, linear, warmup_cosine, wsd

CORNERS = {
    "constant": (constant(2.0, warmup=4), {0: 0, 1: 0.5, 3: 1.5, 4: 2, 1000: 2}),
    "constant, no warmup": (constant(2.0), {0: 2, 7: 2}),
    "linear": (linear(2.0, steps=12, warmup=4, end=1.0), {0: 0, 4: 2, 8: 1.5, 12: 1, 99: 1}),
    "linear, no warmup": (linear(2.0, steps=10), {0: 2, 5: 1, 9: 0.2, 10: 0, 11: 0}),
    "cosine": (
        warmup_cosine(2.0, steps=12, warmup=4, end=1.0),
        {0: 0, 2: 1, 4: 2, 6: 1.5 + 0.5 * 2**-0.5, 8: 1.5, 12: 1, 99: 1},
    ),
    "cosine, no warmup": (warmup_cosine(2.0, steps=8), {0: 2, 4: 1, 8: 0, 9: 0}),
    "cosine, all warmup": (warmup_cosine(2.0, steps=4, warmup=8), {0: 0, 3: 0.75, 4: 1, 8: 2}),
    "cosine, peak 0": (warmup_cosine(0.0, steps=4), {0: 0, 4: 0}),
    "inverse sqrt": (inverse_sqrt(2.0, warmup=4), {0: 0, 2: 1, 4: 2, 16: 1, 64: 0.5}),
    "wsd": (
        wsd(2.0, steps=20, warmup=4, decay=6, end=1.0),
        {0: 0, 4: 2, 13: 2, 14: 2, 17: 1.5, 20: 1, 30: 1},
    ),
    "wsd, all decay": (wsd(2.0, steps=10, decay=10), {0: 2, 5: 1, 10: 0}),
}


@pytest.mark.parametrize("name", CORNERS)
def test_corner_points(name):
    schedule, points = CORNERS[name]
    steps, values = np.array(list(points)), np.array(list(points.values()), np.float32)
    traced = jax.jit(jax.vmap(schedule))(jnp.asarray(steps, jnp.int32))
    np.testing.assert_allclose(np.broadcast_to(traced, values.shape), values, atol=1e-6)
    np.testing.assert_allclose([float(schedule(int(step))) for step in steps], values, atol=1e-6)


def test_cosine_is_that_of_optax():
    ours = warmup_cosine(3e-4, steps=50, warmup=10, end=3e-5)
    theirs = optax.warmup_cosine_decay_schedule(0.0, 3e-4, 10, 50, end_value=3e-5)
    for step in range(0, 60, 3):
        np.testing.assert_allclose(ours(step), theirs(step), rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: inverse_sqrt(1.0, warmup=0), "inverse_sqrt: warmup is 0; choose 1 step or more"),
        (lambda: linear(1.0, steps=0), "linear: steps is 0; choose 1 or more"),
        (lambda: constant(1.0, warmup=-1), "schedule: warmup: found -1; give 0 or more"),
        (
            lambda: wsd(1.0, steps=10, warmup=4, decay=7),
            "wsd: a decay of 7 steps does not fit into the 6 steps after the warmup; choose from 1",
        ),
        (lambda: wsd(1.0, steps=10, decay=0), "a decay of 0 steps does not fit"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(InputError, match=message):
        make()
