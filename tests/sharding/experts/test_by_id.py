"""Experts in host memory, fetched by the tokens' choice, against all of them on the devices."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import colossax
from colossax.aot import host_arithmetic
from colossax.aot.saved import scopes
from colossax.config import ExpertsConfig, Plan
from colossax.errors import PlanError
from colossax.inference import inference_plan
from colossax.nn.experts import ExpertMLP
from colossax.offload.memory import HOST
from colossax.sharding import experts as sharded
from tests.cases import quick_first

LAYERS, EXPERTS, EMBED, MLP, TOKENS, CHOICES = 3, 8, 16, 8, 5, 2
INTO, OUT = ("expert_embed", "expert_mlp"), ("expert_mlp", "expert_embed")
DIMS = {"up": ("experts", *INTO), "gate": ("experts", *INTO), "down": ("experts", *OUT)}
DIMS |= {"up_bias": ("experts", INTO[1]), "gate_bias": ("experts", INTO[1])}
DIMS |= {"down_bias": ("experts", INTO[0])}
MESHES = {
    "one": Plan(mesh={"data": 1}),
    "expert 8": Plan(mesh={"expert": 8}),
    "expert 4, fsdp": Plan(mesh={"expert": 4, "fsdp": 2}),
    "folded": Plan(mesh={"expert": 2, "tensor": 2, "ring": 2}),
    "tensor beside": Plan(
        mesh={"expert": 2, "tensor": 4}, experts=ExpertsConfig(group="expert", dispatch="passes")
    ),
    "fsdp": Plan(mesh={"fsdp": 8}, experts=ExpertsConfig(group="none")),
    "replicas": Plan(
        mesh={"expert": 2, "tensor": 4},
        experts=ExpertsConfig(group="expert", placement=((0, 1, 2, 3, 4), (4, 5, 6, 7, 0))),
    ),
}


def drawn():
    """Stacks of all layers, a router and tokens of which the last is padding."""
    rng = np.random.default_rng(0)

    def array(*shape):
        return rng.normal(size=shape).astype(np.float32)

    stacks = {
        "up": array(LAYERS, EXPERTS, EMBED, MLP),
        "gate": array(LAYERS, EXPERTS, EMBED, MLP),
        "down": array(LAYERS, EXPERTS, MLP, EMBED),
    }
    valid = np.arange(TOKENS)[None] < TOKENS - 1
    return stacks, array(EMBED, EXPERTS), array(1, TOKENS, EMBED), valid


def mixed(x, router, arrays, valid, layer=None, bias=False):
    dims = {name: DIMS[name] for name in arrays}
    compute = ExpertMLP(bias=bias)
    weights = sharded.ExpertWeights(arrays=arrays, dims=dims, compute=compute, layer=layer)
    return sharded.moe(
        x,
        sharded.LinearRouter(w=router),
        weights,
        gate=sharded.TopK(k=CHOICES),
        valid=valid,
        balance="none",
        decoding=True,
    )


def by_id(stacks, router, x, valid, layer, stacked):
    there = jax.tree.map(lambda w: jax.device_put(w if stacked else w[1], HOST), stacks)
    return mixed(x, router, there, valid, layer if stacked else None)


@functools.cache
def wanted():
    stacks, router, x, valid = jax.tree.map(jnp.asarray, drawn())
    arrays = {name: w[1] for name, w in stacks.items()}
    return jax.jit(mixed)(x, router, arrays, valid)


CASES = list(itertools.product(MESHES, [True, False]))


@pytest.mark.catches("expert-of-another-layer")
@pytest.mark.catches("last-expert-left-out")
@pytest.mark.parametrize(
    ("name", "stacked"), quick_first(CASES, [("one", True), ("expert 4, fsdp", True)])
)
def test_the_chosen_give_what_all_of_them_give(name, stacked, devices):
    plan = inference_plan(MESHES[name])
    bound = plan.bind(jax.devices()[: 1 if name == "one" else 8])
    stacks, router, x, valid = drawn()
    with colossax.use(bound):
        found, sums = jax.jit(by_id, static_argnums=5)(
            stacks, router, x, valid, jnp.int32(1), stacked
        )
    expected, expected_sums = wanted()
    np.testing.assert_allclose(found[:, :-1], expected[:, :-1], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(sums["expert_load"], expected_sums["expert_load"])


def test_devices_that_gather_an_expert_together_take_the_same_turns(devices):
    """One has tokens and the other none: with turns of their own they would wait for ever."""
    stacks, router, _, _ = drawn()
    arrays = {name: w[1] for name, w in stacks.items()}
    x = np.random.default_rng(2).normal(size=(4, TOKENS, EMBED)).astype(np.float32)
    valid = np.arange(TOKENS)[None] < np.array([[TOKENS], [0], [0], [0]])
    expected, _ = jax.jit(mixed)(x, router, arrays, valid)
    bound = Plan(mesh={"expert": 2, "fsdp": 2}).bind(devices[:4])
    with colossax.use(bound):
        found, _ = jax.jit(by_id, static_argnums=5)(stacks, router, x, valid, 1, False)
    np.testing.assert_allclose(
        np.asarray(found)[valid], np.asarray(expected)[valid], rtol=1e-5, atol=1e-5
    )


@pytest.mark.catches("layer-of-what-is-on-the-device")
def test_biases_are_on_the_device_beside_matrices_in_host_memory():
    stacks, router, x, valid = drawn()
    rng = np.random.default_rng(1)
    biases = {
        name: rng.normal(size=(EXPERTS, width)).astype(np.float32)
        for name, width in (("up_bias", MLP), ("gate_bias", MLP), ("down_bias", EMBED))
    }
    there = jax.tree.map(lambda w: jax.device_put(w, HOST), stacks)
    here = {name: w[1] for name, w in stacks.items()}
    found, expected = (
        jax.jit(functools.partial(mixed, bias=True))(x, router, {**arrays, **biases}, valid, layer)
        for arrays, layer in ((there, jnp.int32(1)), (here, None))
    )
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-5)


@pytest.mark.catches("experts-fetched-whole")
def test_one_expert_is_fetched_at_a_time():
    stacks, router, x, valid = drawn()
    stacks = jax.tree.map(lambda w: jax.device_put(w, jax.memory.Space.Host), stacks)
    traced = jax.make_jaxpr(mixed)(x, router, stacks, valid, jnp.int32(1))
    shapes = [
        variable.aval.shape
        for scope in scopes(traced)
        for equation in scope.eqns
        if equation.primitive.name == "device_put"
        for variable in equation.invars
        if "host" in str(variable.aval)
    ]
    assert host_arithmetic(traced) == []
    assert sorted(shapes) == sorted([(1, EMBED, MLP), (1, EMBED, MLP), (1, MLP, EMBED)])


def test_experts_that_lie_elsewhere_than_they_compute_are_refused(devices):
    plan = Plan(mesh={"expert": 8})
    rules = plan.rules.updated(params={"experts": None})
    bound = inference_plan(plan.replace(rules=rules)).bind(jax.devices())
    stacks, router, x, valid = drawn()
    with (
        colossax.use(bound),
        pytest.raises(
            PlanError,
            match="their group is expert, and in host memory they are split over none; let",
        ),
    ):
        jax.eval_shape(
            functools.partial(by_id, stacked=True), stacks, router, x, valid, jnp.int32(1)
        )
