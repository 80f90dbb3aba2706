"""What stages with programs of their own are given: batches from elsewhere, optimizers, layers."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from colossax.config import BatchConfig, PipelineConfig, Plan
from colossax.errors import PlanError
from colossax.optim import layerwise, sgd
from colossax.planner import build_step
from colossax.step.programs.rehearsed import rehearsed
from tests.step.stages.test_stages import Stacked, counted_loss, devices_of

PLAN = Plan(mesh={"stage": 2, "data": 2}, pipeline=PipelineConfig(microbatches=2, cuts=(3, 1)))
X = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)


def small_step(plan=PLAN, optimizer=None, **more):
    """A scale and four layers."""
    dims = {"x": ("batch", "embed")}
    devices = devices_of(plan) if plan.mesh else jax.devices()[:1]
    how = (optimizer or sgd(1e-2), counted_loss, plan)
    return build_step(Stacked, *how, devices=devices, batch_dims=dims, **more)


def on(shape, names, *spec):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(shape), names)
    return NamedSharding(mesh, PartitionSpec(*spec))


@pytest.mark.catches("programs-batch-as-it-lies")
def test_batches_that_lie_elsewhere_give_the_same():
    step = small_step()
    stages = NamedSharding(step.bound.mesh, PartitionSpec("stage"))
    places = [stages, on((4,), ("dp",), "dp"), on((2, 2), ("a", "b"), "b", "a"), jax.devices()[2]]
    state, found = step.init(0), []
    for x in (X, *(jax.device_put(X, place) for place in places)):
        total, _ = step.evaluate(state, {"x": x})["square"]
        found.append(float(total))
    assert found == found[:1] * len(found)
    placed = step.place({"x": X})
    assert step.place(placed)["x"] is placed["x"]


def a_number_for_each_layer(dims):
    """Gradients over the root of the sum of squares that those of their layer have had so far."""

    def added(total, grad):
        return total + jnp.sum(jnp.square(grad), axis=tuple(range(total.ndim, grad.ndim)))

    def scaled(grad, total):
        return -grad / jnp.sqrt(total).reshape(*total.shape, *[1] * (grad.ndim - total.ndim))

    def init(params):
        return optax.ScaleByRssState(jax.tree.map(lambda x: jnp.zeros(x.shape[:-2]), params))

    def update(grads, state, params=None):
        totals = jax.tree.map(added, state.sum_of_squares, grads)
        return jax.tree.map(scaled, grads, totals), optax.ScaleByRssState(totals)

    return optax.GradientTransformation(init, update)


@pytest.mark.catches("programs-numbers-on-all-stages")
def test_optimizers_with_a_number_for_each_layer_equal_one_device():
    found = []
    for plan in (Plan(), PLAN):
        step = small_step(plan, layerwise(a_number_for_each_layer))
        state, first = step.init(0), None
        for _ in range(2):
            state, metrics = step(state, {"x": X})
            first = first or jax.tree.leaves(jax.device_get(state["opt_state"]))
        found.append((float(metrics["loss"]), np.sort(np.hstack(first))))
    for want, got in zip(*found, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_a_stage_without_anything_to_learn_is_rehearsed():
    step = small_step(trainable=lambda info: info.span is not None and info.span[0] >= 3)
    batch = step.abstract_batch({"x": jax.ShapeDtypeStruct(X.shape, X.dtype)})
    ran = rehearsed(step, batch, compiled_here).stages
    assert all("conclude" in [one.name for one in stage.ran] for stage in ran)


def test_two_numbers_of_microbatches_are_refused_unless_they_are_one():
    plan = PLAN.replace(batch=BatchConfig(microbatch=2))
    small_step(plan).place({"x": X})  # 8 rows on 2 devices, 2 rows of each at a time
    step, batch = small_step(PLAN.replace(batch=BatchConfig(microbatch=1))), {"x": X}
    told = "both .* are given; 1 rows at a time are 4 microbatches of this batch, not 2"
    with pytest.raises(PlanError, match=told):
        step.place(batch)
    with pytest.raises(PlanError, match=told):
        small_step(step.bound.plan, shapes=batch)
    step.evaluation._batches.place(batch)


def compiled_here(stage, lowered):
    program = lowered.compile()
    stats, out = program.memory_analysis(), program.output_shardings
    return types.SimpleNamespace(stats=stats, out_shardings=out)
