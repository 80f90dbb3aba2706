"""Every kind of model and loss, layers updated during backward: the ordinary plan's gradients."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from colossax.config import BatchConfig, OffloadConfig, Plan, Segment
from colossax.errors import PlanError
from colossax.nn import LayerStack, param
from colossax.optim import adamw, constant, sgd
from colossax.planner import build_step
from colossax.tasks import next_token_loss
from tests.cases import quick_first
from tests.models.test_families import TEXTS, TINY
from tests.nn.test_kinds import KINDS
from tests.oracle import assert_losses_close, assert_trees_close
from tests.step.offloaded.streamed import (
    CONFIG,
    FULL,
    HOST,
    SHARED,
    batch,
    by_path,
    host,
    offloaded,
    started,
)

QUICK = ("llama3", "gpt2")
"""One with tied heads, one with biases."""


def gradients(plan, *, model=CONFIG, loss=None, batch_=None, devices=None, **options):
    """(loss, totals and metrics, `{path: gradient}`) of one batch."""
    state, step = started(plan, sgd(1.0), model=model, loss=loss, devices=devices, **options)
    given = step.place(batch() if batch_ is None else batch_)
    gradients = jax.jit(step.gradients)(state, given)
    found = jax.tree.map(np.asarray, (gradients.totals, gradients.sums))
    return float(gradients.loss), found, by_path(step, gradients.grads)


@functools.cache
def ordinary():
    """Those of the small model under the ordinary plan."""
    return gradients(FULL)


def assert_gradients_equal(plan, other, **settings):
    value, totals, grads = gradients(plan, **settings)
    want, wanted_totals, wanted = gradients(other, **settings) if settings else ordinary()
    np.testing.assert_allclose(value, want, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), totals, wanted_totals)
    assert grads.keys() == wanted.keys()
    assert_trees_close(grads, wanted, tolerance=2e-6)
    return grads


@pytest.mark.parametrize("name", quick_first(TEXTS, QUICK))
def test_families(name):
    """Packed rows of several documents, with padding and the z-loss."""
    assert_gradients_equal(host(), FULL, model=TINY[name])


REMAT = {
    "none": Segment(),
    "full": Segment(remat="full"),
    "dots": Segment(remat="dots"),
    "names": Segment(remat="qkv+attention"),
    "input": Segment(remat="full", offload="input"),
    "activations": Segment(remat="attention", offload="activations"),
    "mlp": Segment(remat="attention", offload="mlp"),
    "half mlp": Segment(remat="full", offload="mlp+input", mlp_share=0.5),
    "no mlp": Segment(remat="full", offload="mlp+input", mlp_share=0.0),
    "single": Segment(count=1, offload="activations+optimizer+parameters"),
}


@pytest.mark.parametrize("name", quick_first(REMAT, ("names", "half mlp", "no mlp")))
def test_what_backward_keeps_and_where(name):
    segments = (REMAT[name],) if name != "single" else (REMAT[name], Segment(remat="full"))
    plan = Plan(segments=segments)
    if name in ("none", "full", "dots", "names"):
        plan = host(plan)
    assert_gradients_equal(plan, FULL)


@pytest.mark.sweep
@pytest.mark.parametrize("name", REMAT)
def test_so_it_is_on_several_devices(devices, name):
    segments = (REMAT[name],) if name != "single" else (REMAT[name], Segment(remat="full"))
    plan = Plan(segments=segments, mesh={"fsdp": 4, "tensor": 2}, batch=BatchConfig(accumulation=2))
    if name in ("none", "full", "dots", "names"):
        plan = offloaded(plan, **SHARED)
    other = plan.replace(segments=FULL.segments, offload=OffloadConfig())
    assert_gradients_equal(plan, other, batch_=batch(rows=16), devices=devices)


def test_a_loss_may_take_a_key_and_variables():
    def loss(model, batch, *, key, variables):
        terms, metrics = next_token_loss()(model, batch)
        total, weight, one = terms["cross_entropy"]
        factor = variables["factor"] * (1 + jax.random.uniform(key))
        return {"cross_entropy": (factor * total, weight, one)}, metrics

    settings = {"loss": loss, "variables": {"factor": jnp.float32(3)}}
    cut = FULL.replace(batch=BatchConfig(accumulation=2))
    assert_gradients_equal(host(cut), cut, **settings)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_frozen_leaves_inside_the_stack_do_not_move(clip):
    def trainable(info):
        return "attn" in info.path or info.path.startswith("embed")

    found = []
    for plan in (FULL, host(clipping="two_pass")):
        state, step = started(plan, adamw(1e-2, eps=1e-5), trainable=trainable, clip_norm=clip)
        start = by_path(step, state["params"])
        state, metrics = step(state, batch())
        found.append((by_path(step, state["params"]), float(metrics["grad_norm"])))
    (params, norm), (want, wanted) = found[1], found[0]
    moved = {name for name in params if np.any(params[name] != start[name])}
    assert moved == {name for name in params if "attn" in name or "embed" in name}
    assert_trees_close(params, want)
    np.testing.assert_allclose(norm, wanted, rtol=1e-6)


class Block(nnx.Module):
    """Its carry is a dict; what it adds depends on side inputs, its number and a scale."""

    def __init__(self, *, rngs):
        self.w = param(jax.random.normal(rngs.params(), (8, 8)) / 3, ("embed", "mlp"))
        self.scale = param(jnp.ones(8), ("embed",))

    def __call__(self, carry, side, state):
        bias, mask, ids = side
        hidden = jnp.tanh(carry["x"] @ self.w[...] + bias * mask) * self.scale[...]
        x = carry["x"] + hidden * (1 + 0.1 * state.index) + 0.01 * ids
        seen = carry["seen"] + jnp.sum(hidden**2, axis=-1)
        return {"x": x, "seen": seen}, state, {"size": jnp.sum(x**2)}


class Two(nnx.Module):
    """Two stacks of different depth; the second one's side input is what the first one gave."""

    def __init__(self, rngs):
        self.first = LayerStack(lambda rngs: Block(rngs=rngs), 3, rngs=rngs)
        self.second = LayerStack(lambda rngs: Block(rngs=rngs), 5, rngs=rngs)
        self.bias = param(jax.random.normal(rngs.params(), (8,)), ("embed",))

    def __call__(self, x, mask, ids):
        carry = {"x": x, "seen": jnp.zeros(x.shape[:-1])}
        one = self.first(carry, (self.bias[...], mask, ids))
        carry = {"x": jnp.ones_like(x), "seen": one.carry["seen"]}
        two = self.second(carry, (one.carry["x"], mask, ids))
        return two.carry, {**one.sums, "more": two.sums["size"]}


def two_loss(model, batch):
    """Of the results, of what the stacks carry along, and of sums by layer."""
    carry, sums = model(batch["x"], batch["mask"], batch["ids"])
    count = jnp.float32(batch["x"].shape[0])
    depth = jnp.arange(1, 4, dtype=jnp.float32)
    return {
        "fit": (jnp.sum((carry["x"] - 1) ** 2), count, 1.0),
        "seen": (jnp.sum(carry["seen"]), count, 0.3),
        "sizes": (jnp.sum(sums["size"] * depth) + sums["more"][1], count, 0.05),
    }, {"more": (jnp.sum(sums["more"]), count)}


def two_batch(rows=8):
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(rows, 8)).astype(np.float32),
        "mask": (rng.random((rows, 8)) < 0.7).astype(np.float32),
        "ids": rng.integers(0, 3, (rows, 1)).astype(np.int32),
    }


@functools.cache
def plain_gradients():
    """Of the same model without stacks: a loop in Python over its layers' parameters."""
    state, step = started(Plan(), sgd(1.0), model=Two, loss=two_loss)
    params = by_path(step, state["params"])
    batch = two_batch()
    names = {name: f"['{name}']" for name in ("first", "second", "bias")}

    def run(params, stack, carry, side, depth):
        bias, mask, ids = side
        sums = []
        for i in range(depth):
            w, scale = (params[f"{names[stack]}['{leaf}']"][i] for leaf in ("w", "scale"))
            hidden = jnp.tanh(carry["x"] @ w + bias * mask) * scale
            x = carry["x"] + hidden * (1 + 0.1 * i) + 0.01 * ids
            carry = {"x": x, "seen": carry["seen"] + jnp.sum(hidden**2, axis=-1)}
            sums.append(jnp.sum(x**2))
        return carry, jnp.stack(sums)

    def value(params):
        side = (params[names["bias"]], batch["mask"], batch["ids"])
        carry, sizes = run(params, "first", {"x": batch["x"], "seen": jnp.zeros(8)}, side, 3)
        side = (carry["x"], *side[1:])
        carry = {"x": jnp.ones_like(carry["x"]), "seen": carry["seen"]}
        carry, more = run(params, "second", carry, side, 5)
        total = jnp.sum((carry["x"] - 1) ** 2) + 0.3 * jnp.sum(carry["seen"])
        return (total + 0.05 * (jnp.sum(sizes * jnp.arange(1, 4)) + more[1])) / 8

    return jax.jit(jax.value_and_grad(value))(params)


PLACED = (HOST, SHARED, {"fused": True})
SEGMENTS = ((Segment(),), FULL.segments, (Segment(count=1), Segment(remat="full")))


@pytest.mark.parametrize(
    ("segments", "settings"),
    quick_first(itertools.product(SEGMENTS, PLACED), list(zip(SEGMENTS, PLACED, strict=True))),
)
def test_a_model_of_ones_own(segments, settings):
    """Side inputs that parameters reach, sums in the loss, a pytree carried, two stacks."""
    plan = offloaded(Plan(segments=segments), **settings)
    value, totals, grads = gradients(plan, model=Two, loss=two_loss, batch_=two_batch())
    want, wanted = plain_gradients()
    np.testing.assert_allclose(value, want, rtol=1e-6)
    assert_trees_close(grads, wanted, tolerance=2e-6)
    assert np.abs(wanted["['bias']"]).max() > 1e-2
    assert np.isfinite(totals[1]["more"][0])


def test_a_model_of_ones_own_on_several_devices(devices):
    plan = Plan(segments=FULL.segments, batch=BatchConfig(accumulation=2))
    settings = {"model": Two, "loss": two_loss, "batch_": two_batch(16), "devices": devices}
    assert_gradients_equal(host(plan), plan, **settings)


@jax.custom_vjp
def spoiling(x, much):
    """x; its gradient is not finite where `much` is."""
    return x


spoiling.defvjp(
    lambda x, much: (x, much), lambda much, dx: (dx * (1 + jnp.max(much)), jnp.zeros_like(much))
)


class Spoiled(Two):
    """The gradient of the first stack, which backward reaches last, is not finite."""

    def __call__(self, x, mask, ids, much):
        first = self.first({"x": x, "seen": x[..., 0]}, (self.bias[...], mask, ids))
        carry = {**first.carry, "x": spoiling(first.carry["x"], much)}
        return self.second(carry, (self.bias[...], mask, ids)).carry["x"]


def spoiled_loss(model, batch):
    x = model(*(batch[name] for name in ("x", "mask", "ids", "much")))
    return {"fit": (jnp.sum(x**2), jnp.float32(len(x)), 1.0)}, {}


def test_nothing_moves_when_an_earlier_microbatch_was_not_finite():
    plan = host(Plan(segments=FULL.segments, batch=BatchConfig(accumulation=2)))
    state, step = started(plan, sgd(0.1), model=Spoiled, loss=spoiled_loss)
    many = {**two_batch(), "much": np.zeros((8, 1), np.float32)}
    state, metrics = step(state, many)
    assert np.isfinite(metrics["grad_norm"]) and int(state["skipped"]) == 0
    before = jax.tree.map(np.array, by_path(step, state["params"]))
    many["much"][:4] = np.inf
    state, metrics = step(state, many)
    assert np.isfinite(metrics["loss"]) and int(state["skipped"]) == 1
    for name, leaf in by_path(step, state["params"]).items():
        np.testing.assert_array_equal(leaf, before[name], err_msg=name)


def test_layers_of_float32_vectors_only_stay_on_the_device():
    _, step = started(host(), sgd(1.0))
    kinds = {
        info.path: sharding.memory_kind
        for info, sharding in zip(
            jax.tree.leaves(step.spec.infos),
            jax.tree.leaves(step.shardings["params"]),
            strict=True,
        )
    }
    for path, kind in kinds.items():
        there = path.startswith("layers/") and path.endswith("/w")
        assert (kind == "pinned_host") == there, path


def several_kinds(order):
    """Losses of a stack of several kinds, by how much of it lives in host memory."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layers = LayerStack(KINDS, order, rngs=rngs)

    def loss(model, batch):
        out = model.layers(batch["x"], 0.1)
        count = jnp.float32(8)
        terms = {"square": (jnp.sum(out.carry**2), count, 1.0)}
        return terms, {"load": (out.sums["load"], count)}

    batch = {"x": np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)}
    options = {"devices": jax.devices()[:2], "batch_dims": {"x": ("batch", "embed")}}

    def losses(share):
        offload = OffloadConfig(parameters=share, optimizer=share)
        plan = Plan(mesh={"fsdp": 2}, offload=offload)
        step = build_step(Model, adamw(constant(1e-2)), loss, plan, **options)
        state, seen = step.init(0), []
        for _ in range(3):
            state, metrics = step(state, batch)
            seen.append(float(metrics["loss"]))
        return seen

    return losses


def test_kinds_that_follow_one_another_are_updated_during_backward():
    losses = several_kinds(["wide"] * 2 + ["thin"] * 4)
    assert_losses_close(losses(1.0), losses(0.0))


def test_kinds_that_alternate_are_refused():
    with pytest.raises(PlanError, match="'layers' alternates kinds of layers"):
        several_kinds(["thin", "thin", "wide"] * 2)(1.0)
