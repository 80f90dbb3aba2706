"""Schedules at their corners, eagerly and traced."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from colossax.errors import InputError
from colossax.optim import (
    constant,
    inverse_sqrt,
    linear,
    multistep,
    one_cycle,
    polynomial,
    warmup_cosine,
    wsd,
)

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
    "polynomial": (
        polynomial(2.0, steps=12, warmup=4, end=1.0),
        {0: 0, 2: 1, 4: 2, 6: 1 + 0.75**2, 8: 1.25, 12: 1, 99: 1},
    ),
    "polynomial, cubic": (polynomial(2.0, steps=8, power=3.0), {0: 2, 4: 0.25, 8: 0, 9: 0}),
    "polynomial, a root": (polynomial(2.0, steps=4, power=0.5), {0: 2, 3: 1, 4: 0}),
    "one cycle": (
        one_cycle(2.0, steps=12, warmup=4, start=0.5, end=0.4),
        {0: 1, 1: 1.5 - 0.5 * 2**-0.5, 2: 1.5, 4: 2, 8: 1.2, 12: 0.4, 99: 0.4},
    ),
    "one cycle, 0.3 of it up": (
        one_cycle(2.0, steps=20),
        {0: 0.08, 3: 1.04, 6: 2, 13: 1, 20: 0, 21: 0},
    ),
    "one cycle, all down": (one_cycle(2.0, steps=8, warmup=0), {0: 2, 4: 1, 8: 0}),
    "multistep": (
        multistep(2.0, milestones={10: 0.5, 6: 0.1}, warmup=4),
        {0: 0, 2: 1, 4: 2, 5: 2, 6: 0.2, 9: 0.2, 10: 1, 99: 1},
    ),
    "multistep, to nothing": (
        multistep(2.0, milestones={1: 0.0, 3: 0.5}),
        {0: 2, 1: 0, 2: 0, 3: 1, 4: 1},
    ),
    "wsd, all decay": (wsd(2.0, steps=10, decay=10), {0: 2, 5: 1, 10: 0}),
}


@pytest.mark.catches("one-cycle-start")
@pytest.mark.catches("multistep-joint")
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


def test_one_cycle_is_that_of_optax():
    ours = one_cycle(3e-4, steps=50, warmup=15, start=0.04, end=3e-4 * 0.04 / 1e4)
    theirs = optax.cosine_onecycle_schedule(50, 3e-4, 0.3, 25.0, 1e4)
    for step in range(0, 60, 3):
        np.testing.assert_allclose(ours(step), theirs(step), rtol=1e-5, atol=1e-12)


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
        (lambda: polynomial(1.0, steps=9, power=0.0), "polynomial: power: found 0.0; give a"),
        (lambda: one_cycle(1.0, steps=9, start=2.0), "one_cycle: start: found 2.0; give 0 to 1"),
        (lambda: one_cycle(1.0, steps=9, warmup=-1), "schedule: warmup: found -1; give 0 or more"),
        (lambda: multistep(1.0, milestones={}), "multistep: there is no milestone; give steps"),
        (
            lambda: multistep(1.0, milestones={4: 0.1}, warmup=4),
            "multistep: milestone 4 is not after the warmup of 4 steps; give 5 or more",
        ),
        (
            lambda: multistep(1.0, milestones={4: 1.5}),
            "multistep: milestone 4: found 1.5; give 0 to 1",
        ),
    ],
)
def test_refusals(make, message):
    with pytest.raises(InputError, match=message):
        make()
