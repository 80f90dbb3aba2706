"""A step is put together from parts that others may bring."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from colossax.config import BatchConfig, Plan
from colossax.models import maker
from colossax.planner import build_step
from colossax.sharding import use
from colossax.step.gradients.accumulate import accumulate
from colossax.step.gradients.method import GradientMethod
from colossax.step.step import WholeUpdate
from colossax.step.updaters import Updater
from colossax.tasks import next_token_loss
from tests.oracle import assert_losses_close, assert_trees_close
from tests.step.test_step import CONFIG, text_batch


def test_a_gradient_method_of_ones_own_takes_the_place_of_another():
    """One that runs the microbatches from the last to the first."""
    plan = Plan(mesh={"fsdp": 1}, batch=BatchConfig(accumulation=4))
    one = jax.devices()[:1]
    step = build_step(maker(CONFIG), optax.sgd(1.0), next_token_loss(), plan, devices=one)
    in_order = accumulate(step.loss_call, step.bound, step.infos, step.trainable)

    def from_the_last(params, variables, micro):
        arrays, keys = jax.tree.map(lambda x: jnp.flip(x, axis=0), (micro.arrays, micro.keys))
        return in_order(params, variables, dataclasses.replace(micro, arrays=arrays, keys=keys))

    updater = WholeUpdate(from_the_last, step.optimizer, step.spec.infos, step.trainable, 0.5)
    assert isinstance(updater, Updater) and isinstance(updater.gradients, GradientMethod)
    state, batch = step.init(0), step.place(text_batch())

    @jax.jit
    def updated(state, batch):
        with use(step.bound):
            return updater.update(state, step.microbatches(state, batch))

    found = updated(state, batch)
    clipped = build_step(
        maker(CONFIG), optax.sgd(1.0), next_token_loss(), plan, devices=one, clip_norm=0.5
    )
    new, metrics = clipped(state, batch)
    assert_losses_close(found.gradients.loss, metrics["loss"])
    assert_losses_close(found.gradients.norm, metrics["grad_norm"])
    assert_trees_close(found.params, new["params"])
    assert found.finite and found.pending is None
