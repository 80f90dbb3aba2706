"""What layers count reaches metrics and `after_step`, per layer, however a batch is cut."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from colossax.config import BatchConfig, OffloadConfig, Plan
from colossax.layerwise import Maximum
from colossax.nn import LayerStack, param
from colossax.optim import sgd
from colossax.planner import build_step


class Layer(nnx.Module):
    def __init__(self, *, rngs):
        self.w = param(jax.random.normal(rngs.params(), (4, 4)), ("embed", "mlp"))

    def __call__(self, x, side, state):
        x = jnp.tanh(x @ self.w[...])
        return x, state, {"load": jnp.sum(jnp.abs(x), axis=0), "top": Maximum(jnp.max(x))}


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = LayerStack(lambda rngs: Layer(rngs=rngs), 3, rngs=rngs)


def loss(model, batch):
    out = model.layers(batch["x"])
    count = jnp.float32(batch["x"].shape[0])
    terms = {"square": (jnp.sum(jnp.square(out.carry)), count, 1.0)}
    return terms, {"load": (out.sums["load"], count), "top": out.sums["top"]}


X = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
SEVERAL = BatchConfig(accumulation=4)
PLANS = {
    "whole": Plan(mesh={"data": 2}),
    "accumulated": Plan(mesh={"data": 2}, batch=SEVERAL),
    "reduced once": Plan(mesh={"data": 2}, batch=BatchConfig(accumulation=4, reduce_once=True)),
    "streamed": Plan(mesh={"data": 2}, batch=SEVERAL, offload=OffloadConfig(fused=True)),
}


@pytest.mark.catches("maxima-added")
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_sums_and_maxima_are_those_of_the_whole_batch(plan):
    seen = {}

    def after(variables, sums):
        return {"load": sums["load"][0], "top": jnp.maximum(variables["top"], sums["top"].value)}

    start = {"load": jnp.zeros((3, 4)), "top": jnp.full(3, -jnp.inf)}
    step = build_step(
        Model,
        sgd(optax.constant_schedule(0.1)),
        loss,
        plan,
        devices=jax.devices()[:2],
        variables=start,
        after_step=after,
        batch_dims={"x": ("batch", "embed")},
    )
    state = step.init(0)
    ws, x = np.asarray(jax.tree.leaves(state["params"])[0]), X
    for w in ws:
        x = np.tanh(x @ w)
        seen.setdefault("load", []).append(np.abs(x).sum(axis=0))
        seen.setdefault("top", []).append(x.max())
    evaluated = step.evaluate(state, {"x": X})
    np.testing.assert_allclose(evaluated["load"][0], seen["load"], rtol=1e-5)
    np.testing.assert_allclose(evaluated["top"].value, seen["top"], rtol=1e-5)
    state, metrics = step(state, {"x": X})
    np.testing.assert_allclose(state["variables"]["load"], seen["load"], rtol=1e-5)
    np.testing.assert_allclose(state["variables"]["top"], seen["top"], rtol=1e-5)
    np.testing.assert_allclose(metrics["load"], np.asarray(seen["load"]) / 8, rtol=1e-5)
    np.testing.assert_allclose(metrics["top"], seen["top"], rtol=1e-5)
