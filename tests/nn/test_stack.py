"""LayerStack: scan equals a loop, segments do not show, state and sums travel."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from colossax.config import Plan, Segment
from colossax.errors import PlanError
from colossax.nn import LayerStack, describe, param, pure
from colossax.sharding import param_sharding, use
from tests.cases import quick_first
from tests.oracle import assert_trees_close


class Layer(nnx.Module):
    def __init__(self, *, rngs):
        self.w = param(jax.random.normal(rngs.params(), (4, 4)), ("embed", "mlp"))

    def __call__(self, x, side, state):
        x = jnp.tanh(checkpoint_name(x @ self.w[...], "mlp")) + side
        scanned = None if state.scanned is None else state.scanned + x.sum()
        carried = None
        if state.carried is not None:
            carried = state.carried.at[state.index].set(x[0, 0])
        state = dataclasses.replace(state, scanned=scanned, carried=carried)
        return x, state, {"mass": jnp.sum(x), "index": state.index.astype(jnp.float32)}


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = LayerStack(lambda rngs: Layer(rngs=rngs), 8, rngs=rngs)


def build(*segments):
    with use(Plan(mesh={"fsdp": 1}, segments=segments).bind(jax.devices()[:1])):
        return Model(nnx.Rngs(params=0))


def weights(model):
    """All layers' weights in order, `[8, 4, 4]`."""
    parts = [np.asarray(s.w[...]) for s in model.layers.segments]
    return np.concatenate([p if p.ndim == 3 else p[None] for p in parts])


def loop(ws, x, side):
    for w in ws:
        x = jnp.tanh(x @ w) + side
    return x


X = jax.random.normal(jax.random.key(5), (3, 4))
SEGMENTS = [
    (Segment(),),
    (Segment(count=3), Segment(count=5)),
    (Segment(count=1), Segment(count=7)),
    (Segment(count=1), Segment(), Segment(count=1)),
]


@pytest.mark.parametrize("segments", SEGMENTS)
def test_equals_a_plain_loop_with_gradients(segments):
    model = build(*segments)
    graphdef, _ = nnx.split(model)

    def through(params):
        return jnp.sum(nnx.merge(graphdef, params).layers(X, 0.1).carry ** 2)

    want, want_grad = jax.value_and_grad(lambda ws: jnp.sum(loop(ws, X, 0.1) ** 2))(weights(model))
    got, grad = jax.value_and_grad(through)(pure(model))
    np.testing.assert_allclose(got, want, rtol=1e-6)
    grads = [g.reshape(-1, 4, 4) for g in jax.tree.leaves(grad)]
    assert_trees_close(np.concatenate(grads), want_grad)


@pytest.mark.catches("layers-alike")
def test_segments_do_not_show_in_the_values():
    reference = weights(build(*SEGMENTS[0]))
    for segments in SEGMENTS[1:]:
        np.testing.assert_array_equal(weights(build(*segments)), reference)


@pytest.mark.catches("layer-numbers")
@pytest.mark.parametrize("segments", SEGMENTS)
def test_state_and_sums_are_per_layer(segments):
    out = build(*segments).layers(X, 0.0, scanned=jnp.zeros(8), carried=jnp.zeros(8))
    assert out.scanned.shape == (8,)
    np.testing.assert_array_equal(out.sums["index"], np.arange(8))
    np.testing.assert_allclose(out.scanned, out.sums["mass"], rtol=1e-6)
    assert float(out.carried[7]) == float(out.carry[0, 0])
    assert np.all(np.asarray(out.carried) != 0)


@pytest.mark.parametrize(
    "remat", quick_first(["full", "dots", "mlp", "qkv+mlp"], ["dots", "qkv+mlp"])
)
def test_remat_policies_change_nothing_but_memory(remat):
    model = build(Segment())
    graphdef, params = nnx.split(model)[0], pure(model)

    def loss(params, plan):
        with use(plan.bind(jax.devices()[:1])):
            return jnp.sum(nnx.merge(graphdef, params).layers(X, 0.1).carry ** 2)

    one = Plan(mesh={"fsdp": 1})
    want = jax.grad(loss)(params, one)
    got = jax.grad(loss)(params, one.replace(segments=(Segment(remat=remat),)))
    assert_trees_close(got, want)


@pytest.mark.catches("remat-keeps-other-names")
def test_a_policy_keeps_what_it_names_beside_the_layer_inputs():
    """Of each layer `full` keeps its input alone, `mlp` a product as well."""
    model = build(Segment())
    graphdef, params = nnx.split(model)[0], pure(model)
    wide = jnp.ones((512, 4))

    def temp_bytes(remat):
        plan = Plan(mesh={"fsdp": 1}, segments=(Segment(remat=remat),)).bind(jax.devices()[:1])

        def loss(params):
            with use(plan):
                return jnp.sum(nnx.merge(graphdef, params).layers(wide, wide).carry ** 2)

        return jax.jit(jax.grad(loss)).lower(params).compile().memory_analysis().temp_size_in_bytes

    full = temp_bytes("full")
    one = 8 * wide.nbytes
    more = {remat: temp_bytes(remat) - full for remat in ("qkv", "mlp", "qkv+mlp", "none")}
    assert more.pop("none") in (one, 2 * one)  # of product and tanh, JAX 0.12 keeps one
    assert more == {"qkv": 0, "mlp": one, "qkv+mlp": one}


@pytest.mark.catches("single-layer-stacked")
def test_paths_and_layers_of_parameters():
    with use(Plan(segments=SEGMENTS[3]).bind(jax.devices())):
        infos = jax.tree.leaves(describe(Model).infos)
    assert {info.path for info in infos} == {"layers/w"}
    assert [info.first_layer for info in infos] == [0, 1, 7]
    assert [info.layer_count for info in infos] == [1, 6, 1]
    assert [info.stacked for info in infos] == [False, True, False]
    assert infos[1].dims == ("layers", "embed", "mlp")
    assert all(info.total_layers == 8 for info in infos)


class WithVectors(nnx.Module):
    def __init__(self, rngs):
        self.layers = LayerStack(lambda rngs: _Vectors(rngs=rngs), 3, rngs=rngs)


class _Vectors(Layer):
    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.norm = param(jnp.ones(4), ("embed",))
        self.unnamed = nnx.Param(jnp.ones(4))


@pytest.mark.catches("vectors-leave-the-device")
@pytest.mark.parametrize("optimizer", ["optimizer", "optimizer+disk", "optimizer+cpu"])
def test_vectors_stay_on_the_device_wherever_their_layer_lives(optimizer):
    segments = (Segment(count=1), Segment(offload=f"parameters+{optimizer}"))
    bound = Plan(segments=segments).bind(jax.devices()[:4])
    with use(bound):
        infos = jax.tree.leaves(describe(WithVectors).infos)
    away = [info for info in infos if info.segment[1] == 1]
    assert {info.placement for info in away} == {segments[1].placement}
    assert [info.path for info in infos if info.on_host] == ["layers/w"]
    assert [info.path for info in infos if info.optimizer_on_host] == ["layers/w"]
    for role in ("params", "optimizer", "gradients"):
        for info in infos:
            memory = param_sharding(bound, role, info).memory_kind
            there = role != "gradients" and info in away and info.path == "layers/w"
            assert (memory == "pinned_host") == there, (role, info.path)
            assert param_sharding(bound, role, info.on_device()).memory_kind != "pinned_host"


def test_a_loop_is_emitted_for_several_layers_and_none_for_one():
    def loops(*segments):
        model = build(*segments)
        return str(jax.make_jaxpr(lambda x: model.layers(x, 0.0).carry)(X)).count("scan[")

    assert loops(Segment()) == 1
    assert loops(*(Segment(count=1),) * 8) == 0


@pytest.mark.parametrize("segments", [(Segment(count=3),), (Segment(count=8), Segment(count=1))])
def test_segments_that_do_not_cover_the_layers_are_refused(segments):
    with pytest.raises(PlanError, match="do not cover 8 layers"):
        build(*segments)


def test_a_plan_with_other_segments_than_the_model_is_refused():
    model = build(Segment())
    other = Plan(mesh={"fsdp": 1}, segments=SEGMENTS[1]).bind(jax.devices()[:1])
    with use(other), pytest.raises(PlanError, match=r"wants layers 3, 5, the model was built"):
        model.layers(X, 0.0)
