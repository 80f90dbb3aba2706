"""What newcomers give `boost`: what works is right, what does not names the call that was meant."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import optax
import pytest
from flax import nnx

from colossax import Plan, boost, build_step, preset
from colossax.config import BatchConfig
from colossax.errors import InputError

DIMS = {"x": ("batch", None), "y": ("batch", None)}


class Net(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(8, 16, rngs=rngs)
        self.outer = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.outer(jax.nn.relu(self.inner(x)))


def squares(model, batch):
    error = jnp.square(model(batch["x"]) - batch["y"])
    return {"error": (jnp.sum(error), jnp.float32(error.size), 1.0)}, {}


def mean_of_squares(model, batch):
    return jnp.mean(jnp.square(model(batch["x"]) - batch["y"]))


def batch(rows=16):
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(rows, 8)), "y": rng.normal(size=(rows, 4))}


@pytest.fixture
def as_users_have_it():
    """Without the type checks that these tests put around the library's functions."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def losses(loss, plan, steps=3):
    devices = None if isinstance(plan, str) else jax.devices()[: math.prod(plan.mesh.values())]
    state, step = boost(Net, optax.adam(1e-2), loss, plan, batch_dims=DIMS, devices=devices)
    found = []
    for _ in range(steps):
        state, metrics = step(state, batch())
        found.append(float(metrics["loss"]))
    return found


@pytest.mark.catches("scalar-loss")
@pytest.mark.parametrize("mesh", [{"data": 1}, {"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 8}])
def test_a_loss_may_be_one_number(mesh):
    np.testing.assert_allclose(
        losses(mean_of_squares, Plan(mesh=mesh)), losses(squares, Plan(mesh={"data": 1})), rtol=1e-5
    )


@pytest.mark.catches("scalar-loss-of-several")
def test_one_number_is_refused_where_it_is_of_several_microbatches():
    plan = Plan(mesh={"data": 2}, batch=BatchConfig(accumulation=2))
    state, step = boost(
        Net, optax.sgd(0.1), squares, plan, batch_dims=DIMS, devices=jax.devices()[:2]
    )
    step.loss_call = dataclasses.replace(step.loss_call, loss=mean_of_squares)
    with pytest.raises(InputError, match="2 microbatches it must be known"):
        step.evaluate(state, batch())
    with pytest.raises(
        InputError, match="2 microbatches it must be known what each counts; return"
    ):
        losses(mean_of_squares, plan)


def test_a_preset_may_be_named():
    assert losses(squares, "zero3") == losses(squares, preset("zero3").replace(mesh={"fsdp": 8}))


def test_several_models_by_name_pass():
    def loss(models, batch):
        return squares(models["actor"], batch)

    build_step({"actor": Net, "critic": Net}, optax.sgd(1e-2), loss, "ddp")


REFUSED = [
    ({"make_model": Net(nnx.Rngs(0))}, r"built already; .* boost\(lambda rngs: Net\("),
    ({"make_model": "llama"}, "make_model is 'llama'; give a function of rngs"),
    ({"make_model": {"actor": 3}}, "make_model is 3; give a function of rngs"),
    ({"optimizer": 1e-3}, r"optimizer is 0.001; .* optax.adamw\(0.001\)"),
    ({"optimizer": "adam"}, r"optimizer is 'adam'; .* optax.adamw\(0.001\)"),
    ({"optimizer": squares, "loss": optax.sgd(0.1)}, "in the place of the loss; .* this order"),
    ({"loss": "mse"}, "loss is 'mse'; give a function of model and batch"),
    ({"loss": np.zeros((9, 9))}, "loss is a ndarray; give a function"),
    ({"plan": {"data": 2}}, r"plan is {'data': 2}; .* colossax.Plan\(mesh={'data': 2}\)"),
    ({"plan": 8}, r"plan is 8; .* colossax.Plan\(mesh={'fsdp': 8}\)"),
    ({"plan": "zero4"}, "'zero4'; did you mean 'zero3'"),
]


@pytest.mark.usefixtures("as_users_have_it")
@pytest.mark.catches("arguments-unchecked")
@pytest.mark.parametrize("build", [boost, build_step])
@pytest.mark.parametrize("wrong, message", REFUSED)
def test_another_thing_is_refused_with_the_call_that_was_meant(build, wrong, message):
    right = {"make_model": Net, "optimizer": optax.sgd(0.1), "loss": squares, "plan": Plan()}
    with pytest.raises(InputError, match=message) as refused:
        build(**(right | wrong))
    assert "\n" not in str(refused.value)


class Halving(Net):
    def __call__(self, x):
        self.inner.kernel[...] = self.inner.kernel[...] / 2
        return super().__call__(x)


@pytest.mark.catches("parameters-changed")
def test_parameters_changed_by_the_model_itself_are_refused():
    state, step = boost(Halving, optax.sgd(0.1), squares, Plan(mesh={"fsdp": 8}), batch_dims=DIMS)
    for call in (step, step.evaluate):
        with pytest.raises(InputError, match="'inner/kernel' is changed while the loss is comp"):
            call(state, batch())


def test_float64_of_a_batch_becomes_float32():
    single = {name: x.astype(np.float32) for name, x in batch().items()}
    state, step = boost(Net, optax.sgd(0.1), squares, Plan(mesh={"fsdp": 8}), batch_dims=DIMS)
    assert batch()["x"].dtype == np.float64
    double, want = step.evaluate(state, batch()), step.evaluate(state, single)
    np.testing.assert_array_equal(double["error"], want["error"])


@pytest.mark.usefixtures("as_users_have_it")
@pytest.mark.catches("batch-unnamed")
def test_a_batch_without_names_is_refused():
    state, step = boost(Net, optax.sgd(0.1), squares, Plan(mesh={"fsdp": 8}), batch_dims=DIMS)
    for call in (step, step.evaluate):
        with pytest.raises(InputError, match="found a tuple; name its arrays"):
            call(state, tuple(batch().values()))
