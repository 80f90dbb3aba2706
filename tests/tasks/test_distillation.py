"""A student that learns from a teacher: cross entropy and a divergence that stops."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from colossax.config import BatchConfig, LossConfig, Plan, Segment, preset
from colossax.errors import InputError
from colossax.models import LlamaConfig, maker
from colossax.nn import param
from colossax.planner import boost, build_step
from colossax.tasks import (
    distillation_loss,
    distillation_options,
    soft_target_loss,
    soft_target_options,
)
from tests.oracle import assert_losses_close, assert_trees_close
from tests.step.test_step import text_batch

VOCAB = 64
ONE = Plan(mesh={"fsdp": 1})
CUT = preset(
    "zero3",
    mesh={"fsdp": 2, "tensor": 2},
    batch=BatchConfig(accumulation=2),
    loss=LossConfig(vocab_chunks=3),
)


class Table(nnx.Module):
    """What a loss of text asks of a model: a bigram one."""

    def __init__(self, rngs, width=8):
        self.into = param(jax.random.normal(rngs.params(), (VOCAB, width)), ("vocab", "embed"))
        self.out = param(jax.random.normal(rngs.params(), (width, VOCAB)), ("embed", "vocab"))

    def hidden(self, tokens, *, positions=None, segments=None):
        return self.into[...][tokens], {}

    def head_weight(self):
        return self.out[...]


def wide(rngs):
    return Table(rngs, width=12)


MAKERS = {"student": Table, "teacher": wide}


def batch():
    made = text_batch()
    return {**made, "weights": np.random.default_rng(1).integers(0, 2, made["tokens"].shape)}


def made(plan=ONE, *, makers=MAKERS, loss=None, **options):
    devices = jax.devices()[: int(np.prod(list(plan.mesh.values())))]
    loss = distillation_loss() if loss is None else loss
    options = distillation_options(**options)
    return build_step(makers, optax.sgd(0.5), loss, plan, devices=devices, **options)


def by_hand(student, params, alpha, temperature=1.0):
    """The loss from whole logits."""
    arrays, teacher = {k: jnp.asarray(x) for k, x in batch().items()}, params["teacher"]
    own, told = (
        jax.nn.log_softmax(p["into"][arrays["tokens"]] @ p["out"] / t)
        for p, t in ((student, 1.0), (teacher, temperature))
    )
    soft = jax.nn.log_softmax(student["into"][arrays["tokens"]] @ student["out"] / temperature)
    error = -jnp.take_along_axis(own, arrays["targets"][..., None], axis=-1)[..., 0]
    apart = jnp.sum(jnp.exp(told) * (told - soft), axis=-1) * temperature**2
    weights = arrays["weights"]
    return jnp.sum(weights * (error + alpha * apart)) / jnp.sum(weights)


@pytest.mark.catches("student-alone")
def test_it_is_cross_entropy_and_a_divergence_by_hand():
    step = made(CUT, loss=distillation_loss(temperature=2.0), alpha=0.7)
    state = step.init()
    params = jax.tree.map(np.asarray, state["params"])
    value, grads = jax.value_and_grad(by_hand)(params["student"], params, 0.7, 2.0)
    new, metrics = step(state, batch())
    assert_losses_close(metrics["loss"], value)
    moved = jax.tree.map(lambda p, g: p - 0.5 * g, params["student"], grads)
    assert_trees_close(new["params"]["student"], moved)
    assert_trees_close(new["params"]["teacher"], params["teacher"], tolerance=0)


@pytest.mark.catches("text-beside-the-teacher")
@pytest.mark.parametrize("text", [0.0, 0.25, 1.0])
def test_shares_of_the_teacher_and_of_the_text_by_hand(text):
    loss = soft_target_loss(text=text, temperature=2.0)
    devices = jax.devices()[:4]
    step = build_step(MAKERS, optax.sgd(0.5), loss, CUT, devices=devices, **soft_target_options())
    state = step.init()
    params = jax.tree.map(np.asarray, state["params"])

    def wanted(student):
        """Both terms of `by_hand`, from what it gives without and with the second."""
        alone = by_hand(student, params, 0.0)
        return text * alone + (1 - text) * (by_hand(student, params, 1.0, 2.0) - alone)

    value, grads = jax.value_and_grad(wanted)(params["student"])
    new, metrics = step(state, batch())
    assert_losses_close(metrics["loss"], value)
    assert ("cross_entropy" in metrics, "divergence" in metrics) == (text > 0, text < 1)
    moved = jax.tree.map(lambda p, g: p - 0.5 * g, params["student"], grads)
    assert_trees_close(new["params"]["student"], moved)
    assert_trees_close(new["params"]["teacher"], params["teacher"], tolerance=0)


@pytest.mark.catches("distilled-for-ever")
def test_after_its_steps_the_student_learns_from_text_alone():
    step = made(alpha=0.7, until=2)
    state = step.init()
    for alpha in (0.7, 0.7, 0.0, 0.0):
        params = jax.tree.map(np.asarray, state["params"])
        value = by_hand(params["student"], params, alpha)
        state, metrics = step(state, batch())
        assert_losses_close(metrics["loss"], value)
        assert (metrics["divergence"] > 0) == (alpha > 0)
    assert float(made(alpha=0.7, until=0).init()["variables"]["alpha"]) == 0
    state = {**state, "variables": {**state["variables"], "alpha": jnp.float32(0.5)}}
    assert step.evaluate(state, batch())["divergence"][0] > 0


@pytest.mark.catches("divergence-of-bare-products")
def test_refusals():
    for call, message in (
        (lambda: distillation_loss(temperature=0.0), "temperature"),
        (lambda: distillation_options(alpha=-1.0), "alpha"),
        (lambda: distillation_options(until=-1), "until"),
        (lambda: soft_target_loss(temperature=0.0), "temperature"),
        (lambda: soft_target_loss(text=1.5), "text"),
    ):
        with pytest.raises(InputError, match=message):
            call()

    class Longer(Table):
        def head_weight(self):
            return jnp.pad(self.out[...], ((0, 0), (0, 1)))

    step = made(makers={"student": Table, "teacher": Longer})
    with pytest.raises(InputError, match="64 tokens in its vocabulary and the teacher 65"):
        step(step.init(), batch())

    class Bounded(Table):
        readout = {"soft_cap": 30.0}

    step = made(makers={"student": Table, "teacher": Bounded})
    with pytest.raises(InputError, match="models whose logits are capped or have a bias cannot"):
        step(step.init(), batch())


LLAMA = {"vocab": VOCAB, "embed": 32, "heads": 4, "kv_heads": 2, "mlp": 48, "max_seq": 32}
DECODERS = {
    "student": maker(LlamaConfig(layers=2, **LLAMA)),
    "teacher": maker(LlamaConfig(layers=4, **LLAMA)),
}
PLANS = {
    "cut": CUT,
    "ring": Plan(mesh={"fsdp": 2, "ring": 2, "tensor": 2}),
    "stages": Plan(mesh={"stage": 2, "fsdp": 2}),
    "ulysses, remat": Plan(mesh={"data": 2, "ulysses": 2}, segments=(Segment(remat="full"),)),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", PLANS)
def test_any_mesh_distils_as_one_device(name):
    found = []
    for plan in (ONE, PLANS[name]):
        devices = jax.devices()[: int(np.prod(list(plan.mesh.values())))]
        options = distillation_options(alpha=0.5, until=2)
        state, step = boost(
            DECODERS, optax.adamw(1e-2), distillation_loss(), plan, devices=devices, **options
        )
        losses = []
        for _ in range(3):
            state, metrics = step(state, batch())
            losses.append([float(metrics[one]) for one in ("loss", "divergence")])
        found.append(losses)
    assert_losses_close(found[1], found[0], tolerance=2e-5)
