"""Evaluation of any number of rows on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from colossax.config import BatchConfig, Plan
from colossax.errors import InputError
from colossax.layerwise import Maximum
from colossax.planner import boost
from tests.oracle import assert_trees_close

DIMS = {"x": ("batch", None), "y": ("batch",)}
MESHES = [{"data": 1}, {"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}]
CUTS = [BatchConfig(), BatchConfig(accumulation=4), BatchConfig(microbatch=3)]


def model(rngs):
    return nnx.Linear(8, 4, rngs=rngs)


def loss(model, batch):
    """Without weights of tokens: rows that are added would count."""
    logits = model(batch["x"])
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    right = jnp.sum(jnp.argmax(logits, -1) == batch["y"], dtype=jnp.float32)
    rows = jnp.float32(each.size)
    metrics = {"accuracy": (right, 7 * rows), "logits": (jnp.sum(logits, 0), rows)}
    return {"nll": (jnp.sum(each), rows, 1.0)}, {**metrics, "worst": Maximum(jnp.max(each))}


def mean(model, batch):
    return jnp.mean(jnp.square(model(batch["x"])))


def rows(count):
    rng = np.random.default_rng(count)
    x = rng.normal(size=(count, 8)).astype(np.float32)
    return {"x": x, "y": rng.integers(0, 4, count).astype(np.int32)}


def made(mesh, cut=CUTS[0], loss=loss):
    devices = jax.devices()[: np.prod(list(mesh.values()))]
    plan = Plan(mesh=mesh, batch=cut)
    return boost(model, optax.sgd(0.1), loss, plan, batch_dims=DIMS, devices=devices)


@pytest.fixture(scope="module")
def plainly():
    """Totals of rows on one device, at once."""
    state, step = made(MESHES[0])
    merged = step.model(state)

    def totals(batch):
        terms, metrics = loss(merged, batch)
        return {**{name: term[:2] for name, term in terms.items()}, **metrics}

    return totals


@pytest.mark.catches("evaluate-counts-added-rows")
@pytest.mark.catches("evaluate-copies-of-a-unit")
@pytest.mark.catches("evaluate-one-form")
@pytest.mark.catches("evaluate-last-form")
@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("mesh", MESHES)
def test_any_number_of_rows_counts_as_on_one_device(mesh, cut, plainly):
    state, step = made(mesh, cut)
    for count in (96, 296, 7, 1, 96, 50):
        want = jax.device_get(plainly(rows(count)))
        for place in (dict, jax.device_put):
            found = jax.device_get(step.evaluate(state, place(rows(count))))
            assert found["nll"][1] == count and found["accuracy"][1] == 7 * count
            assert found["accuracy"][0] == want["accuracy"][0]
            assert_trees_close(found, want)


@pytest.mark.catches("evaluate-mean-with-added-rows")
@pytest.mark.parametrize("mesh", MESHES[1:])
def test_a_mean_is_that_of_the_rows_given(mesh):
    def of_mean(model, batch):
        return {"mse": (mean(model, batch), 1.0, 1.0)}, {}

    state, step = made(mesh, loss=of_mean)
    for count in (15, 13, 7, 31):
        total, weight = step.evaluate(state, rows(count))["mse"]
        expected = mean(step.model(state), rows(count))
        np.testing.assert_allclose(total / weight, expected, rtol=1e-5)


@pytest.mark.catches("evaluate-declares")
def test_what_is_evaluated_does_not_say_what_is_trained():
    state, step = made({"fsdp": 8})
    step.evaluate(state, rows(40))
    state, _ = step(state, rows(16))
    with pytest.raises(InputError, match="differs from what the step was compiled for"):
        step(state, rows(40))


@pytest.mark.catches("evaluate-one-number")
def test_one_number_is_refused_where_added_rows_would_count():
    state, step = made({"fsdp": 8}, loss=mean)
    total, weight = step.evaluate(state, rows(48))["scalar"]
    expected = mean(step.model(state), rows(48))
    np.testing.assert_allclose(total / weight, expected, rtol=1e-6)
    with pytest.raises(InputError, match="one number, in which the 4 rows that fill .* of 8 would"):
        step.evaluate(state, rows(44))
