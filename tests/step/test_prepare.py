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
from colossax.step.loss import any_order
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


@pytest.mark.catches("prepared-ahead-in-the-order-of-a-ring")
@pytest.mark.catches("prepared-ahead-with-padding")
@pytest.mark.catches("prepared-ahead-of-other-numbers")
@pytest.mark.parametrize("seq", [16, 14])
def test_a_batch_is_prepared_ahead_in_its_own_order_on_any_mesh(seq, devices):
    """Rows of a ring lie otherwise, and the shorter ones are filled up; of several steps each
    learns from what the first state said."""
    batch, calls = {name: x[:, :seq] for name, x in text_batch().items()}, []

    def once(models, batch):
        calls.append(batch["tokens"].shape)
        return batch if "reference" in batch else prepare(models, batch)

    step = made(prepare=once)
    state = step.init()
    wanted = host(step.prepare(state, batch))
    assert set(wanted) == {"reference", "centred"}
    on_ring = made(preset("zero3", mesh={"ring": 2, "fsdp": 2}), once, any_order(loss), devices[:4])
    found = on_ring.prepare(on_ring.init(), batch)
    assert all(x.is_fully_replicated for x in found.values())
    np.testing.assert_allclose(found["reference"], wanted["reference"], rtol=1e-5, atol=1e-6)
    losses = []
    for one, kept in ((made(loss=loss), wanted), (on_ring, host(found))):
        state, seen = one.init(), []
        for _ in range(2):
            state, metrics = one(state, {**batch, **wanted, "reference": kept["reference"]})
            seen.append(float(metrics["loss"]))
        losses.append(seen)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


@pytest.mark.catches("prepared-ahead-of-nothing")
def test_what_has_no_preparation_prepares_nothing():
    step = made()
    with pytest.raises(InputError, match="prepare: the step has none; give boost what makes more"):
        step.prepare(step.init(), text_batch())


def test_what_is_no_batch_is_refused():
    step = made(prepare=lambda models, batch: batch["tokens"])
    with pytest.raises(InputError, match="prepare: expected the batch with more arrays, found "):
        step(step.init(), text_batch())
