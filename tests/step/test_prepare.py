"""What is prepared of a global batch: once, before it is cut, without gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from colossax.config import BatchConfig, Plan, preset
from colossax.errors import InputError
from colossax.planner import build_step
from colossax.sharding import current
from tests.oracle import assert_losses_close, assert_trees_close
from tests.step.test_several_models import Critic
from tests.step.test_step import text_batch

MAKERS = {"critic": Critic, "reference": Critic}
FOUR = BatchConfig(accumulation=4)
ONE = Plan(mesh={"fsdp": 1}, batch=FOUR)


def values(model, batch):
    return model.layers(model.table[batch["tokens"]]).carry.sum(axis=-1)


def prepare(models, batch):
    """By a frozen model, and by the one that learns, over all rows."""
    own = values(models.critic, batch)
    return {**batch, "reference": values(models.reference, batch), "centred": own - own.mean()}


def loss(models, batch):
    """Gradients of another size where `centred` is no constant."""
    found = values(models.critic, batch)
    error = jnp.square(found - batch["reference"]) + found * batch["centred"]
    weights = batch["weights"]
    return {"error": (jnp.sum(error * weights), jnp.sum(weights), 1.0)}, {}


def learns(info):
    return info.model == "critic"


def made(plan=ONE, prepare=None, loss=loss, devices=None):
    devices = devices or jax.devices()[:1]
    dims = dict.fromkeys(("reference", "centred"), ("batch", "seq"))
    return build_step(
        MAKERS,
        optax.sgd(1e-3),
        loss,
        plan,
        devices=devices,
        prepare=prepare,
        trainable=learns,
        batch_dims=dims,
    )


def host(tree):
    return jax.tree.map(np.asarray, tree)


@pytest.fixture(scope="module")
def by_hand():
    """Two programs: one prepares, the other learns from what it gets."""
    step = made()
    state = step.init()
    whole = jax.jit(lambda params, batch: prepare(step.spec.merge(params), batch))
    batch = host(whole(state["params"], text_batch()))
    grads = jax.jit(step.gradients)(state, step.place(batch))
    return host(grads.grads), float(grads.loss), host(step(state, batch)[0]["params"])


def test_it_runs_once_and_its_arrays_reach_the_loss_cut_up(by_hand):
    calls, shapes = [], set()

    def counted(models, batch):
        calls.append((batch["tokens"].shape, current() is not None))
        return prepare(models, batch)

    def seen(models, batch):
        shapes.add((batch["reference"].shape, batch["centred"].shape))
        return loss(models, batch)

    step = made(prepare=counted, loss=seen)
    state, metrics = step(step.init(), text_batch())
    assert calls == [((8, 16), True)]
    assert shapes == {((2, 16), (2, 16))}
    assert_losses_close(metrics["loss"], by_hand[1])
    assert_trees_close(host(state["params"]), by_hand[2], tolerance=1e-6)


@pytest.mark.catches("prepared-with-gradients")
def test_no_gradient_flows_through_it(by_hand):
    step = made(prepare=prepare)
    state, batch = step.init(), step.place(text_batch())
    assert_trees_close(jax.jit(step.gradients)(state, batch).grads, by_hand[0], tolerance=1e-6)
    # Nor where someone else differentiates.
    outside = jax.jit(jax.grad(lambda p: step.gradients({**state, "params": p}, batch).loss))
    found = outside(state["params"])
    assert_trees_close(found["critic"], by_hand[0]["critic"])


def test_it_sees_the_whole_batch_on_any_mesh(devices, by_hand):
    plan = preset("zero3", mesh={"fsdp": 2, "tensor": 2}, batch=FOUR)
    step = made(plan, prepare, devices=devices[:4])
    _, metrics = step(step.init(), text_batch())
    assert_losses_close(metrics["loss"], by_hand[1])


@pytest.mark.catches("evaluated-unprepared")
def test_an_evaluated_batch_is_prepared_too(by_hand):
    step = made(prepare=prepare)
    total, weight = step.evaluate(step.init(), text_batch())["error"]
    assert_losses_close(total / weight, by_hand[1])


def test_variables_are_given_where_they_are_asked_for():
    def scaled(models, batch, variables):
        return {**batch, "scale": jnp.full(8, variables["scale"])}

    def plain(model, batch):
        return {"sum": (jnp.sum(model.table) * batch["scale"][0], 1.0, 1.0)}, {}

    options = {"prepare": scaled, "variables": {"scale": jnp.float32(3)}}
    plan, one = Plan(mesh={"fsdp": 1}), jax.devices()[:1]
    step = build_step(Critic, optax.sgd(1.0), plain, plan, devices=one, **options)
    state = step.init()
    want = 3 * np.asarray(state["params"]["table"]).sum()
    assert_losses_close(step(state, text_batch())[1]["loss"], want, tolerance=1e-4)


def test_what_is_no_batch_is_refused():
    step = made(prepare=lambda models, batch: batch["tokens"])
    with pytest.raises(InputError, match="prepare: expected the batch with more arrays, found "):
        step(step.init(), text_batch())
