"""What a refusal says about random and running state works as it says."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from colossax.config import BatchConfig, Plan
from colossax.errors import InputError
from colossax.nn.module import KEYS_BY_HAND, STATISTICS_BY_HAND, describe
from colossax.planner import boost
from tests.cases import quick_first

MESHES = [{"data": 1}, {"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}]
DIMS = {"x": ("batch", None)}
X = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)


class WithKey(nnx.Module):
    def __init__(self, rngs):
        scope = {"self": self, "nnx": nnx}
        exec(KEYS_BY_HAND[0], scope)
        self.out = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x, key):
        scope = {"self": self, "nnx": nnx, "x": x, "key": key}
        exec(KEYS_BY_HAND[1], scope)
        return self.out(scope["x"])


class Whitened(nnx.Module):
    def __init__(self, rngs):
        self.out = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x, mean):
        return self.out(x - mean)


def squares(out):
    return {"squares": (jnp.sum(out**2), jnp.float32(out.shape[0]), 1.0)}


def dropping(model, batch, key):
    return squares(model(batch["x"], key)), {}


def counting(model, batch, variables):
    x = batch["x"] + 1
    return squares(model(x, variables["mean"])), {"mean": eval_metric(x)}


def eval_metric(x):
    return eval(STATISTICS_BY_HAND[0].removeprefix("loss metrics "), {"x": x})["mean"]


def after_step():
    text = STATISTICS_BY_HAND[2]
    return eval(text[text.index("lambda") :].removesuffix(")"), {})


def run(make, loss, mesh, **options):
    devices = jax.devices()[: np.prod(list(mesh.values()))]
    plan = Plan(mesh=mesh, batch=BatchConfig(accumulation=2))
    state, step = boost(
        make, optax.sgd(0.1), loss, plan, batch_dims=DIMS, devices=devices, **options
    )
    losses = []
    for _ in range(3):
        state, metrics = step(state, {"x": X})
        losses.append(float(metrics["loss"]))
    return losses, state, step


@pytest.mark.parametrize("mesh", quick_first(MESHES[1:], 2))
def test_keys_given_by_hand_drop_the_same_on_every_mesh(mesh):
    want, state, step = run(WithKey, dropping, MESHES[0])
    np.testing.assert_allclose(run(WithKey, dropping, mesh)[0], want, rtol=1e-5)
    total, weight = step.evaluate(state, {"x": X})["squares"]
    whole = jnp.sum(step.model(state)(X, None) ** 2)
    np.testing.assert_allclose(total, whole, rtol=1e-5)
    dropped = step.model(state)(X, jax.random.key(0))
    assert float(jnp.max(jnp.abs(dropped - step.model(state)(X, None)))) > 1e-3 and weight == 32


@pytest.mark.parametrize("mesh", quick_first(MESHES[1:], 2))
def test_statistics_kept_by_hand_are_the_same_on_every_mesh(mesh):
    given = {"variables": {"mean": jnp.zeros(8)}, "after_step": after_step()}
    want, state, _ = run(Whitened, counting, MESHES[0], **given)
    found, other, _ = run(Whitened, counting, mesh, **given)
    np.testing.assert_allclose(found, want, rtol=1e-5)
    expected = (X + 1).mean(0) * (1 - 0.9**3)
    for one in (state, other):
        np.testing.assert_allclose(one["variables"]["mean"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.catches("by-hand-for-the-other")
@pytest.mark.parametrize(
    "layer, lines",
    [
        (lambda rngs: nnx.Dropout(0.1, rngs=rngs), KEYS_BY_HAND),
        (lambda rngs: nnx.BatchNorm(8, rngs=rngs), STATISTICS_BY_HAND),
    ],
)
def test_a_refusal_says_the_lines_that_do_it(layer, lines):
    with pytest.raises(InputError, match="may hold parameters alone") as refused:
        describe(layer)
    assert " / ".join(lines) in str(refused.value) and "\n" not in str(refused.value)
