"""What stages with programs of their own are given: batches from elsewhere, optimizers, layers."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from colossax.config import PipelineConfig, Plan
from colossax.optim import sgd
from colossax.planner import build_step
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
