"""Random keys of rows: the same on any mesh and in any microbatch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from colossax.config import BatchConfig, Plan
from colossax.nn import param
from colossax.planner import build_step

ROWS = 8


class Nothing(nnx.Module):
    """One number that is added."""

    def __init__(self, rngs):
        self.w = param(jnp.zeros(()), ())


def loss(model, batch, row_keys):
    """What is drawn for each row, in the place of its number."""
    if row_keys is None:
        return {"sum": (model.w[...], jnp.float32(1), 1.0)}, {}
    drawn = jax.vmap(jax.random.uniform)(row_keys)
    places = batch["number"][:, None] == jnp.arange(ROWS)
    found = jnp.sum(places * drawn[:, None], axis=0)
    return {"sum": (model.w[...], jnp.float32(1), 1.0)}, {"drawn": (found, jnp.float32(1))}


def drawn(plan, steps=1):
    """By row, after so many steps."""
    devices = jax.devices()[: int(np.prod(list(plan.mesh.values())))]
    step = build_step(Nothing, optax.sgd(0.0), loss, plan, devices=devices)
    state, batch = step.init(), {"number": np.arange(ROWS)}
    for _ in range(steps):
        state, metrics = step(state, batch)
    assert "drawn" not in step.evaluate(state, batch)
    return np.asarray(metrics["drawn"]) * plan.batch.accumulation


def plan(accumulation=1, **mesh):
    return Plan(mesh=mesh, batch=BatchConfig(accumulation=accumulation))


@pytest.mark.catches("keys-by-microbatch")
def test_a_row_draws_the_same_wherever_it_comes():
    wanted = drawn(plan(data=1))
    assert len(np.unique(wanted)) == ROWS
    for other in (plan(4, data=1), plan(2, fsdp=2, tensor=2)):
        np.testing.assert_array_equal(drawn(other), wanted)


def test_another_step_draws_anew():
    one, two = (drawn(plan(data=1), steps) for steps in (1, 2))
    assert not np.any(one == two)
