"""Averages of parameters: by hand, in float64, and of what a state to evaluate is made."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from colossax.errors import InputError
from colossax.optim import Groups, adamw, averaged, constant, ema, is_layerwise, schedule_free, sgd
from tests.optim.table import DIMS, STEPS, assert_close, draw, run, unit

GRADIENTS = [unit(1, 0, seed) for seed in range(1, 1 + STEPS)]


def state_of(params, opt_state):
    return {"params": params, "opt_state": opt_state}


@pytest.mark.catches("ema-lags")
@pytest.mark.parametrize("inner", [sgd(0.1, momentum=0.9), optax.sgd(0.1, momentum=0.9)])
def test_an_average_follows_any_optimizer(inner):
    params, state = run(ema(inner, 0.6)(DIMS), unit(0, 0, 0), GRADIENTS)
    wanted = {name: w.astype(np.float64) for name, w in unit(0, 0, 0).items()}
    for steps in range(1, 1 + STEPS):
        plain, _ = run(sgd(0.1, momentum=0.9)(DIMS), unit(0, 0, 0), GRADIENTS[:steps])
        wanted = {name: 0.6 * w + 0.4 * np.asarray(plain[name]) for name, w in wanted.items()}
    assert_close(params, plain)
    assert_close(averaged(state_of(params, state))["params"], wanted)


@pytest.mark.catches("schedule-free-share")
@pytest.mark.parametrize("rate", [0.1, constant(0.1, warmup=2)])
def test_schedule_free_is_what_its_paper_says(rate):
    found, state = run(schedule_free(rate, weight_decay=0.2)(DIMS), unit(0, 0, 0), GRADIENTS)
    evaluated = averaged(state_of(found, state))["params"]
    for name, w in unit(0, 0, 0).items():
        x = z = y = w.astype(np.float64)
        v, total, largest = np.zeros(w.shape), 0.0, 0.0
        for at, grads in enumerate(GRADIENTS):
            g, lr = grads[name].astype(np.float64), float(rate(at)) if callable(rate) else rate
            v = 0.95 * v + 0.05 * g**2
            step = g / (np.sqrt(v / (1 - 0.95 ** (at + 1))) + 1e-8) + (name == "w") * 0.2 * y
            largest = max(largest, lr)
            total += largest**2
            c = largest**2 / total if total else 0.0
            z = z - lr * step
            x = (1 - c) * x + c * z
            y = 0.1 * z + 0.9 * x
        np.testing.assert_allclose(found[name], y, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(evaluated[name], x, rtol=1e-5, atol=1e-5)


def test_schedule_free_is_that_of_optax():
    theirs = optax.contrib.schedule_free_adamw(0.1, b1=0.9, b2=0.95, weight_decay=0.0)
    found, _ = run(schedule_free(0.1, weight_decay=0.0)(DIMS), unit(0, 0, 0), GRADIENTS)
    wanted, _ = run(theirs, unit(0, 0, 0), GRADIENTS)
    assert_close(found, wanted, rtol=1e-5)


def test_before_the_first_step_the_average_is_the_parameters():
    params = jax.tree.map(jnp.asarray, {"w": draw(0, (8, 16))})
    for make in (ema(adamw(0.1)), schedule_free(0.1)):
        state = make({"w": DIMS["w"]}).init(params)
        np.testing.assert_array_equal(averaged(state_of(params, state))["params"]["w"], params["w"])


def test_what_is_frozen_and_other_models_stay():
    params = {"a": {"w": jnp.ones((8, 16)), "still": jnp.ones(3)}, "b": {"w": jnp.ones(4)}}
    learning = {"w": params["a"]["w"], "still": None}
    optimizer = ema(sgd(0.1), 0.5)({"w": DIMS["w"], "still": None})
    grads = {"w": jnp.ones((8, 16)), "still": None}
    _, state = optimizer.update(grads, optimizer.init(learning), learning)
    found = averaged(state_of(params, {"a": state, "b": optax.sgd(0.1).init(params["b"])}))
    np.testing.assert_allclose(found["params"]["a"]["w"], 0.95)
    assert found["params"]["a"]["still"] is params["a"]["still"]
    assert found["params"]["b"] is params["b"]


def test_groups_of_what_is_within_are_checked_and_kept():
    groups = Groups(multiples={"attn/": 0.5})
    assert ema(adamw(0.1, groups=groups)).groups == groups
    assert is_layerwise(ema(adamw(0.1))) and not is_layerwise(ema(optax.adam(0.1)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ema(adamw(0.1), 1.0), "ema: decay: found 1.0; give 0 or more, below 1"),
        (lambda: ema({"a": adamw(0.1)}), "ema: it goes around one optimizer; give one that is a"),
        (lambda: schedule_free(0.1, b1=0.0), "schedule_free: b1: found 0.0; give a number above 0"),
        (
            lambda: averaged(state_of({"w": jnp.ones(3)}, optax.sgd(0.1).init({"w": jnp.ones(3)}))),
            "averaged: the optimizer keeps no average of parameters; make it by optim.ema",
        ),
    ],
)
def test_refusals(make, message):
    with pytest.raises(InputError, match=message):
        make()
