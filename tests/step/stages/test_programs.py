"""Stages of unequal sizes, each with a program of its own, equal one device.

The default run takes a few cases, `-m sweep` all others.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from colossax.config import PipelineConfig, Plan, Segment, preset
from colossax.errors import InputError, PlanError, PlanWarning
from colossax.models import maker
from colossax.nn import LayerStack, param
from colossax.offload import resolved_segments
from colossax.optim import adamw, layerwise
from colossax.planner import boost, build_step
from colossax.tasks import next_token_loss
from tests.oracle import assert_losses_close, assert_trees_close
from tests.step import test_parallel_oracle as oracle
from tests.step.stages.test_stages import FULL, MODELS, Counting, devices_of, start, step_of

KEEPING = layerwise(lambda dims: optax.sgd(1e-3, momentum=0.0))
"""Its state is the gradients of the last step."""


def cut(params, plan):
    """Parameters of a stack of eight layers as the plan's segments have them."""
    rows, parts, at = params["layers"]["segments"][0], {}, 0
    for number, segment in enumerate(resolved_segments(plan, 8)):
        of = slice(at, at + segment.count) if segment.count > 1 else at
        parts[number] = jax.tree.map(lambda x, of=of: x[of], rows)
        at += segment.count
    return {**params, "layers": {"segments": parts}}


def joined(params, plan):
    """The stack of eight layers again, of which `cut` made segments."""
    parts = params["layers"]["segments"]
    stacks = [
        parts[number] if segment.count > 1 else jax.tree.map(lambda x: x[None], parts[number])
        for number, segment in enumerate(resolved_segments(plan, 8))
    ]
    rows = jax.tree.map(lambda *each: np.concatenate(each), *stacks)
    return {**params, "layers": {"segments": {0: rows}}}


def after_a_step(model, plan, rows):
    """Gradients and metrics."""
    step = step_of(model, plan, devices_of(plan) if plan.mesh else oracle.ONE, KEEPING)
    params = cut(start(model), plan)
    state = step.init_from(jax.device_put(params, step.shardings["params"]))
    state, metrics = step(state, oracle.batch(model, rows=rows))
    grads = jax.tree.map(np.array, state["opt_state"][0].trace)
    return grads, {name: np.array(value) for name, value in metrics.items()}


@functools.cache
def truth(model, rows):
    return after_a_step(model, Plan(), rows)


def assert_equals_one_device(model, plan, rows=8):
    """Gradients as one stack, as one device has them.

    Those of one layer's queries are a thousandth of the model's largest: on one device rows in
    another order alone change them by 1.07 times of what a leaf of its own might differ by.
    """
    grads, metrics = after_a_step(model, plan, rows)
    want, right = truth(model, rows)
    assert_trees_close(joined(grads, plan), want)
    assert metrics.keys() == right.keys()
    for name, value in right.items():
        assert_losses_close(metrics[name], value)


def uneven(mesh, *cuts, count=4, name="zero3", layout=None, segments=FULL, **more):
    pipeline = PipelineConfig(microbatches=count, cuts=cuts, **more)
    layout = {"tensor_layout": layout} if layout else {}
    return preset(name, mesh=mesh, segments=segments, pipeline=pipeline, **layout)


@pytest.mark.catches("programs-tied-half")
@pytest.mark.catches("programs-own-norm")
def test_uneven_stages_equal_one_device():
    assert_equals_one_device("gpt2", uneven({"stage": 2, "fsdp": 2}, 5, 3))


CASES = {
    "untied": ("llama", uneven({"stage": 2, "fsdp": 2}, 5, 3)),
    "a ring": ("packed", uneven({"stage": 2, "ring": 2, "tensor": 2}, 1, 7)),
    "four": ("bloom", uneven({"stage": 4, "fsdp": 2}, 3, 2, 2, 1)),
    "gpipe": ("llama", uneven({"stage": 2, "ulysses": 2}, 3, 5, schedule="gpipe")),
    "zb_h1": ("llama", uneven({"stage": 2, "data": 2}, 3, 5, schedule="zb_h1")),
    "interleaved": ("gpt2", uneven({"stage": 2}, 1, 3, 2, 2, chunks=2)),
    "zb_v, tied": ("gpt2", uneven({"stage": 2}, 1, 3, 2, 2, schedule="zb_v")),
    "zb_h1, all kept": (
        "llama",
        uneven({"stage": 2, "fsdp": 2}, 3, 5, schedule="zb_h1", segments=(Segment(),)),
    ),
    "2d": ("llama", uneven({"stage": 2, "row": 2, "col": 2}, 2, 6, layout="2d")),
    "fewer microbatches than stages": ("llama", uneven({"stage": 4}, 2, 1, 4, 1, count=2)),
    "rows that do not divide": ("llama", uneven({"stage": 3}, 2, 3, 3, count=3)),
    "policies": (
        "llama",
        uneven(
            {"stage": 2, "fsdp": 2},
            5,
            3,
            segments=(Segment(count=4, remat="full"), Segment(count=4)),
        ),
    ),
}


def test_it_trains_evaluates_saves_and_goes_on_elsewhere(tmp_path):
    plan = uneven({"stage": 2, "fsdp": 2}, 3, 5, count=2)
    one, step = (
        step_of("llama", p, devices_of(p) if p.mesh else oracle.ONE, adamw(1e-2))
        for p in (Plan(), plan)
    )
    batch = oracle.batch("llama", rows=8)
    right, state = one.init(3), step.init(3)
    for at in range(3):
        right, wanted = one(right, batch)
        old = state
        state, metrics = step(state, jax.tree.map(jnp.asarray, batch) if at else batch)
        assert_losses_close(metrics["loss"], wanted["loss"])
        with pytest.raises(InputError, match="given up to an earlier call"):
            step(old, batch)
    assert int(state["step"]) == 3
    evaluated, whole = (
        {name: np.array(total) / np.array(weight) for name, (total, weight) in found.items()}
        for found in (step.evaluate(state, batch), one.evaluate(right, batch))
    )
    for name, mean in whole.items():
        assert_losses_close(evaluated[name], mean)
    step.save(tmp_path, state)
    moved = one.restore(tmp_path)
    back = step.restore(tmp_path)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(back), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    moved, wanted = one(moved, batch)
    state, metrics = step(state, batch)
    assert_losses_close(metrics["loss"], wanted["loss"])


REFUSED = {
    "another sum": ({"cuts": (5, 4)}, {}, "5, 4 are 9 layers, and the model has 8"),
    "as many as no stages": (
        {"cuts": (5, 2, 1)},
        {},
        "3 numbers for 2 stages under schedule '1f1b'; give 2, .* each stage",
    ),
    "chunks that a schedule has not": (
        {"cuts": (2, 2, 2, 2)},
        {},
        "4 numbers for 2 stages under schedule '1f1b'; give 2, .* each stage",
    ),
    "chunks that a schedule has": (
        {"cuts": (5, 3), "schedule": "zb_v"},
        {},
        "2 numbers for 2 stages of 2 chunks under schedule 'zb_v'; give 4, .* each chunk",
    ),
    "one chunk interleaved": (
        {"cuts": (5, 3), "schedule": "interleaved"},
        {},
        "2 numbers for 2 stages of 2 chunks under schedule 'interleaved'; give 4",
    ),
    "a table": ({"cuts": (5, 3), "table": "own.json"}, {}, "plan.pipeline.table"),
}


@pytest.mark.parametrize(("pipeline", "more", "told"), REFUSED.values(), ids=REFUSED)
def test_what_programs_of_stages_do_not_do_is_refused(pipeline, more, told):
    plan = Plan(mesh={"stage": 2, "fsdp": 2}, pipeline=PipelineConfig(**pipeline), **more)
    with pytest.raises(PlanError, match=told):
        step_of("llama", plan, devices_of(plan), KEEPING)


@pytest.mark.catches("programs-any-optimizer")
def test_an_optimizer_that_may_look_at_all_parameters_is_refused():
    plan = uneven({"stage": 2}, 5, 3)
    with pytest.raises(PlanError, match="layerwise"):
        step_of("llama", plan, devices_of(plan), optax.adam(1e-3))


@pytest.mark.sweep
@pytest.mark.parametrize(("model", "plan"), CASES.values(), ids=CASES)
def test_every_form_equals_one_device(model, plan):
    assert_equals_one_device(model, plan)


def test_a_parameter_lives_where_it_is_read_and_no_axis_is_idle(recwarn):
    plan = uneven({"stage": 2, "fsdp": 2}, 5, 3)
    loss = next_token_loss()
    state, _ = boost(maker(MODELS["llama"]), adamw(1e-2), loss, plan, devices=devices_of(plan))
    assert not [each for each in recwarn if issubclass(each.category, PlanWarning)]
    params, first, last = state["params"], set(devices_of(plan)[:2]), set(devices_of(plan)[2:])
    assert params["embed"]["table"].sharding.device_set == first
    assert params["head"]["w"].sharding.device_set == last
    assert params["norm"]["scale"].sharding.device_set == last
    for segment, devices in enumerate((first, last)):
        leaves = jax.tree.leaves(params["layers"]["segments"][segment])
        assert {frozenset(x.sharding.device_set) for x in leaves} == {frozenset(devices)}


class Scaled(nnx.Module):
    """Another kind of layer; both count."""

    def __init__(self, *, rngs):
        self.scale = param(jax.random.normal(rngs.params(), (4,)), ("embed",))
        self.fixed = param(jax.random.normal(rngs.params(), (4,)), ("embed",), learns=False)

    def __call__(self, x, side, state):
        x = x * jnp.tanh(self.scale[...]) + self.fixed[...]
        return x, state, {"load": jnp.sum(jnp.abs(x))}


class Mixed(nnx.Module):
    """Layers of two kinds that take turns as they like."""

    def __init__(self, rngs):
        self.scale = param(jnp.full(4, 1.5), ("embed",))
        kinds = {
            "dense": lambda rngs: Counting(rngs=rngs),
            "scaled": lambda rngs: Scaled(rngs=rngs),
        }
        order = ["dense", "scaled", "scaled", "dense", "dense", "scaled"]
        self.layers = LayerStack(kinds, order, rngs=rngs)


def mixed_loss(model, batch, variables):
    out = model.layers(batch["x"] * model.scale[...] + variables["mean"])
    rows = jnp.float32(batch["x"].shape[0])
    loads = jnp.sum(out.sums["load"] * jnp.arange(1.0, 7.0))
    terms = {
        "square": (jnp.sum(jnp.square(out.carry)), rows, 1.0),
        "balance": (loads, rows, 0.1),
    }
    return terms, {"seen": (jnp.sum(out.carry, axis=0), rows)}


def follow(variables, sums):
    total, weight = sums["seen"]
    return {"mean": 0.9 * variables["mean"] + 0.1 * total / weight}


@pytest.mark.catches("programs-sums-stay")
def test_kinds_of_layers_sums_variables_and_what_does_not_learn():
    x = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    pipeline = PipelineConfig(microbatches=4, cuts=(1, 3, 2))
    found = []
    for plan in (Plan(), Plan(mesh={"stage": 3, "data": 2}, pipeline=pipeline)):
        step = build_step(
            Mixed,
            adamw(1e-2),
            mixed_loss,
            plan,
            devices=devices_of(plan) if plan.mesh else oracle.ONE,
            batch_dims={"x": ("batch", "embed")},
            variables={"mean": jnp.zeros(4)},
            after_step=follow,
            clip_norm=0.5,
        )
        state, told = step.init(0), []
        for _ in range(3):
            state, metrics = step(state, {"x": x})
            told.append([float(metrics[name]) for name in ("loss", "grad_norm", "balance")])
        found.append((told, np.array(state["variables"]["mean"])))
    (want, mean), (got, followed) = found
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(followed, mean, rtol=1e-5)
    assert np.abs(mean).min() > 0


@pytest.mark.parametrize("given", ["1,x", 2.5, [3, None], {"a": 1}, [], True, "3,-1", "0,4"])
def test_cuts_that_are_no_numbers_of_layers_are_refused(given):
    with pytest.raises(PlanError, match="give the layers of each stage, 1 or more, as 10,8,8,6"):
        PipelineConfig(cuts=given)


def test_cuts_are_given_as_numbers_or_their_text():
    assert PipelineConfig(cuts="5, 3") == PipelineConfig(cuts=[5, 3]) == PipelineConfig(cuts=(5, 3))
