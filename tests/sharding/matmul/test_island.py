"""Matmuls in our own regions equal plain ones, values and gradients, in every layout."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.config import Plan, Precision, preset
from colossax.errors import PlanError
from colossax.sharding import constrain, linear, linears, recomputing, use
from tests.cases import quick_first
from tests.oracle import assert_trees_close
from tests.sharding.matmul.layouts import MAPS, PLANS, B, D, S, flat


def plainly(maps, x, weights, biases):
    found = []
    for w, b in zip(weights, biases, strict=True):
        y = jnp.tensordot(x, w, maps.contract)
        found.append(y if b is None else y + b)
    return tuple(found)


def by_plan(maps, x, weights, biases):
    every = [(w, maps.dims(at), b) for at, (w, b) in enumerate(zip(weights, biases, strict=True))]
    return linears(x, every, contract=maps.contract)


def outputs_and_gradients(run, maps, arrays):
    x, weights, biases, scales = arrays

    def total(x, weights, biases):
        ys = run(maps, x, weights, biases)
        return sum(jnp.sum(jnp.sin(y) * c) for y, c in zip(ys, scales, strict=True)), ys

    return jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))(x, weights, biases)


@functools.cache
def drawn_and_truth(kind, *, bias=True):
    """Arrays of the maps, and what plain mathematics makes of them."""
    arrays = MAPS[kind].arrays(bias=bias)
    return arrays, outputs_and_gradients(plainly, MAPS[kind], arrays)


@pytest.mark.parametrize(("plan", "kind"), quick_first(itertools.product(PLANS, MAPS), 7))
def test_every_layout_equals_plain_mathematics_with_gradients(devices, plan, kind):
    arrays, want = drawn_and_truth(kind)
    with use(PLANS[plan].bind(devices)):
        got = outputs_and_gradients(by_plan, MAPS[kind], arrays)
    assert_trees_close(got, want)


@pytest.mark.parametrize("plan", ["2d-2x4", "2.5d-2x2x2", "3d-2x2x2", "1d-sp4"])
def test_recomputed_layers_keep_gathered_operands(devices, plan):
    arrays, want = drawn_and_truth("qkv", bias=False)

    def marked(*args):
        with recomputing():
            return by_plan(*args)

    with use(PLANS[plan].bind(devices)):
        got = outputs_and_gradients(marked, MAPS["qkv"], arrays)
    assert_trees_close(got, want)


@pytest.mark.parametrize("plan", ["2d-fsdp2", "2.5d-2x2x2", "3d-2x2x2", "1d-sp2"])
def test_gradients_of_another_layout_than_the_parameters(devices, plan):
    """As zero1 and zero2 want them: split over axes that the weights are whole along."""
    arrays, want = drawn_and_truth("gate-up")
    rules = PLANS[plan].rules.updated(params={"embed": None})
    with use(PLANS[plan].replace(rules=rules).bind(devices)):
        got = outputs_and_gradients(by_plan, MAPS["gate-up"], arrays)
    assert_trees_close(got, want)


def test_bfloat16_sums_in_the_reduction_dtype(devices):
    arrays, want = drawn_and_truth("qkv")
    plan = PLANS["2.5d-2x2x2"].replace(precision=Precision(compute="bfloat16", reduction="float32"))
    with use(plan.bind(devices)):
        (_, ys), grads = outputs_and_gradients(by_plan, MAPS["qkv"], arrays)
    assert {y.dtype for y in ys} == {jnp.dtype("bfloat16")}
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    assert_trees_close(grads, want[1], tolerance=2e-2)


@pytest.mark.parametrize("lead", [(), (5,), (2, 3, 4)])
def test_inputs_of_other_rank_are_left_to_the_compiler(devices, lead):
    x, w = jnp.ones((*lead, D)), jnp.eye(D)
    with use(PLANS["2d-2x4"].bind(devices)):
        y = jax.jit(lambda x, w: linear(x, w, ("embed", "vocab")))(x, w)
    np.testing.assert_array_equal(y, x)


def test_tokens_that_do_not_divide_are_refused(devices):
    with use(PLANS["2d-8x1"].bind(devices)):
        with pytest.raises(PlanError, match="dim 'batch' has size 6, which mesh axis 'row' of 8"):
            linear(jnp.ones((6, S, D)), jnp.ones((D, 8)), ("embed", "mlp"))


def test_blocks_that_do_not_nest_are_refused(devices):
    rules = PLANS["1d-sp2"].rules.updated(params={"mlp": ("fsdp", "tensor"), "embed": None})
    with use(PLANS["1d-sp2"].replace(rules=rules).bind(devices)):
        with pytest.raises(PlanError, match="which is no block of it; let the rule name first"):
            linear(jnp.ones((B, S, D)), jnp.ones((D, 8)), ("embed", "mlp"))


@pytest.mark.parametrize(
    ("plan", "own"),
    [
        (preset("megatron", mesh={"tensor": 8}), False),
        (preset("megatron_sp", mesh={"tensor": 8}, tensor_matmul="overlap"), True),
        (flat("2d", row=2, col=4), True),
        (Plan(mesh={"row": 2, "col": 4}, tensor_layout="2d", tensor_matmul="compiler"), False),
    ],
)
def test_the_plan_chooses_who_communicates(devices, plan, own):
    def f(x, w):
        return linear(x, w, ("embed", "mlp"))

    with use(plan.bind(devices)):
        text = str(jax.make_jaxpr(f)(jnp.ones((B, S, D)), jnp.ones((D, 8))))
    assert ("shard_map" in text) is own


@pytest.mark.parametrize("layout", ["2d", "2.5d", "3d"])
def test_the_compiler_may_communicate_in_any_layout(devices, layout):
    arrays, want = drawn_and_truth("gate-up")
    mesh = {"row": 2, "col": 4} if layout == "2d" else {"depth": 2, "row": 2, "col": 2}
    plan = Plan(mesh=mesh, tensor_layout=layout, tensor_matmul="compiler")

    def constrained(maps, x, weights, biases):
        ys = by_plan(maps, constrain(x, "batch", "seq", "embed"), weights, biases)
        return tuple(constrain(y, "batch:inner", "seq", "mlp") for y in ys)

    with use(plan.bind(devices)):
        got = outputs_and_gradients(constrained, MAPS["gate-up"], arrays)
    assert_trees_close(got, want)
