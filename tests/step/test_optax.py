"""Optimizers as Optax users write them: on a mesh as Optax alone on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx

from colossax import boost, build_step, next_token_loss
from colossax.config import Plan, preset
from colossax.errors import InputError
from colossax.models import LlamaConfig, maker
from tests.oracle import assert_trees_close
from tests.step.test_step import text_batch

MODEL = maker(LlamaConfig(vocab=64, embed=32, layers=1, heads=4, kv_heads=2, mlp=48, max_seq=16))
PLAN = preset("zero3+megatron", mesh={"data": 2, "fsdp": 2, "tensor": 2})
LOSS = next_token_loss()
STEPS = 3
EPS = 1e-3  # what Adam divides by: a gradient that is rounding alone is not made a step of


def adam(rate):
    return optax.adam(rate, eps=EPS)


def batches():
    names = ("tokens", "targets", "weights")
    made = [text_batch(rows=8, seq=16, seed=seed) for seed in range(STEPS)]
    return [{name: batch[name] for name in names} for batch in made]


def matrices(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def by_rank(params):
    return jax.tree.map(lambda leaf: "matrix" if leaf.ndim > 1 else "vector", params)


def warm(rate):
    return optax.warmup_cosine_decay_schedule(0.0, rate, 2, 10)


CHAINS = {
    "clip, adamw, warmup": optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(warm(1e-2), eps=EPS, mask=matrices)
    ),
    "hyperparameters in the state": optax.inject_hyperparams(optax.adamw)(
        learning_rate=1e-2, eps=EPS
    ),
    "one for matrices, one for vectors": optax.multi_transform(
        {"matrix": adam(1e-2), "vector": optax.sgd(1e-2)}, by_rank
    ),
    "vectors frozen": optax.multi_transform(
        {"matrix": adam(1e-2), "vector": optax.set_to_zero()}, by_rank
    ),
    "decay of matrices": optax.chain(
        optax.scale_by_adam(eps=EPS),
        optax.masked(optax.add_decayed_weights(0.1), matrices),
        optax.scale(-1e-2),
    ),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "lion": optax.lion(1e-3),
    "every second step": optax.MultiSteps(adam(1e-2), every_k_schedule=2),
    "without a schedule": optax.contrib.schedule_free_adamw(1e-2, eps=EPS),
    "average of steps": optax.chain(adam(1e-2), optax.ema(0.9)),
    "muon": optax.contrib.muon(1e-2, eps=EPS),
    "clipped by unit, momentum": optax.chain(
        optax.adaptive_grad_clip(0.1), optax.sgd(1e-1, momentum=0.9, nesterov=True)
    ),
    "only if finite": optax.apply_if_finite(adam(1e-2), max_consecutive_errors=3),
    "less when the loss stays": optax.chain(
        optax.sgd(1e-1), optax.contrib.reduce_on_plateau(patience=1, rtol=1e-6)
    ),
}


def by_optax_alone(optimizer):
    """The parameters and losses of a plain loop."""
    if isinstance(optimizer, optax.MultiSteps):
        optimizer = optimizer.gradient_transformation()
    optimizer = optax.with_extra_args_support(optimizer)
    one = build_step(MODEL, optax.sgd(1.0), LOSS, Plan(), devices=jax.devices()[:1])
    graphdef, params = one.spec.graphdef, one.init(0)["params"]

    @jax.jit
    def step(params, state, batch):
        def loss(params):
            terms, _ = LOSS(nnx.merge(graphdef, params), batch)
            total, weight, _ = terms["cross_entropy"]
            return total / weight

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state, value

    state, losses = optimizer.init(params), []
    for batch in batches():
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    return params, losses


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_does_on_a_mesh_what_it_does_alone(devices, name):
    state, step = boost(MODEL, CHAINS[name], LOSS, PLAN, devices=devices)
    losses = []
    for batch in batches():
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    params, right = by_optax_alone(CHAINS[name])
    assert_trees_close(jax.device_get(state["params"]), jax.device_get(params))
    np.testing.assert_allclose(losses, right, rtol=1e-5)


@pytest.mark.catches("optimizer-without-the-loss")
def test_the_loss_is_handed_to_an_optimizer_that_wants_it(devices):
    def update(updates, state, params=None, *, value, **others):
        return updates, value

    remember = optax.GradientTransformationExtraArgs(lambda params: jnp.zeros(()), update)
    state, step = boost(MODEL, optax.chain(optax.sgd(0.1), remember), LOSS, PLAN, devices=devices)
    state, metrics = step(state, batches()[0])
    assert float(state["opt_state"][1]) == float(metrics["loss"]) > 1


def test_moments_are_split_as_the_plan_says(devices):
    state, _ = boost(MODEL, CHAINS["clip, adamw, warmup"], LOSS, PLAN, devices=devices)
    table = state["opt_state"][1][0].mu["embed"]["table"]
    assert table.size == 4 * table.addressable_shards[0].data.size


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (optax.lookahead(optax.sgd(0.1), 2, 0.5), "optimizer: its update does not work with what"),
        (optax.lbfgs(0.1), "optimizer: its state cannot be laid out beside the parameters"),
    ],
    ids=["lookahead", "lbfgs"],
)
def test_what_a_step_cannot_feed_is_refused(devices, optimizer, message):
    with pytest.raises(InputError, match=message):
        state, step = boost(MODEL, optimizer, LOSS, Plan(), devices=devices[:1])
        step(state, batches()[0])
