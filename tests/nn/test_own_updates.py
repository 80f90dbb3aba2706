"""A weight of which a part is updated by a rule of its own: the largest input seen so far."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from colossax.config import BatchConfig, OffloadConfig, Plan, preset
from colossax.errors import PlanError
from colossax.nn import LayerStack, Linear, param, weight_of, with_weights
from colossax.optim import adamw
from colossax.planner import build_step
from colossax.sharding import linears
from tests.nn.wrapping import Wrapping


@jax.custom_vjp
def noted(x, peak):
    """`x`; what backward calls the gradient of `peak` is the largest |x|."""
    return x


def noted_bwd(largest, dx):
    return dx, largest


noted.defvjp(lambda x, peak: (x, jnp.max(jnp.abs(x))), noted_bwd)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Watched(Wrapping):
    """A weight that notes the largest of its inputs."""

    base: Any
    peak: Any

    @staticmethod
    def multiply(x, maps, *, contract):
        ((own, bias),) = maps
        return linears(noted(x, own.peak), [(own.base, bias)], contract=contract)


class Watcher(nnx.Module):
    def __init__(self, module):
        self.dims, self.base = module.dims, module.held
        self.peak = param(jnp.float32(0), (), dtype="float32", update=jnp.maximum)

    @property
    def weight(self):
        return Watched(weight_of(self.base, self.dims), self.peak[...])


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.map = Linear((8, 8), ("embed", "mlp"), rngs=rngs, std=0.5)

    def __call__(self, x, side, state):
        return self.map(x), state, {}


class Model(nnx.Module):
    def __init__(self, rngs):
        self.first = Linear((4, 8), (None, "embed"), rngs=rngs, std=0.5)
        self.layers = LayerStack(Layer, 3, rngs=rngs)

    def __call__(self, x):
        return self.layers(self.first(x)).carry


def loss(model, batch):
    y = model(batch["x"]).astype(jnp.float32)
    return {"square": (jnp.sum(jnp.square(y - 1)), jnp.float32(y.size), 1.0)}, {}


def step_of(plan, *, watched=True, **options):
    make = with_weights(Model, lambda name, module, rngs: Watcher(module)) if watched else Model
    devices = jax.devices()[: math.prod(plan.mesh.values())]
    return build_step(make, adamw(0.05), loss, plan, devices=devices, **options)


def batches(count):
    rng = np.random.default_rng(0)
    return [{"x": rng.normal(size=(8, 4, 4)).astype(np.float32)} for _ in range(count)]


def inputs(state, batch):
    """The largest |input| of the first map and of each layer's."""
    first = state["params"]["first"]["w"]["base"]
    layers = state["params"]["layers"]["segments"][0]["map"]["w"]["base"]
    x, found = np.asarray(batch["x"]), []
    for w in (first, *layers):
        found.append(np.max(np.abs(x)))
        x = x @ np.asarray(w)
    return np.array(found)


def peaks(state):
    layers = state["params"]["layers"]["segments"][0]["map"]["w"]["peak"]
    return np.array([np.asarray(state["params"]["first"]["w"]["peak"]), *np.asarray(layers)])


@pytest.mark.catches("own-update-in-the-norm")
@pytest.mark.parametrize("mesh", [{"fsdp": 1}, {"fsdp": 2, "tensor": 2}])
def test_a_rule_of_its_own_updates_a_part_and_nothing_else_notices(mesh):
    """Running maxima are those of the inputs; losses and norms, clipped, as without, to the bit."""
    step, plain = (step_of(Plan(mesh=mesh), watched=w, clip_norm=0.1) for w in (True, False))
    state, other = step.init(), plain.init()
    own = [x for x in jax.tree.leaves(step.abstract["opt_state"]) if x.shape in ((), (3,))]
    assert len(own) == len([x for x in jax.tree.leaves(plain.abstract["opt_state"]) if x.ndim == 0])
    want = np.zeros(4)
    for batch in batches(3):
        want = np.maximum(want, inputs(state, batch))
        state, metrics = step(state, batch)
        other, expected = plain(other, batch)
        assert metrics["loss"] == expected["loss"]
        assert metrics["grad_norm"] == expected["grad_norm"]
        np.testing.assert_allclose(peaks(state), want, rtol=1e-6)


@pytest.mark.catches("own-update-of-a-skipped-step")
def test_a_step_that_is_skipped_updates_nothing():
    step = step_of(Plan(mesh={"fsdp": 1}))
    state, _ = step(step.init(), batches(1)[0])
    before = np.array(peaks(state))
    state, metrics = step(state, {"x": np.full((8, 4, 4), 1e30, np.float32)})
    assert metrics["skipped"] == 1
    np.testing.assert_array_equal(peaks(state), before)


def test_microbatches_give_the_sum_and_a_filter_may_leave_it_out():
    plan = Plan(mesh={"fsdp": 1}, batch=BatchConfig(accumulation=2))
    step = step_of(plan)
    (batch,) = batches(1)
    state = step.init()
    first = sum(np.max(np.abs(batch["x"][start::2])) for start in range(2))
    state, _ = step(state, batch)
    np.testing.assert_allclose(peaks(state)[0], first, rtol=1e-6)
    still = step_of(plan, trainable=lambda info: not info.path.endswith("/peak"))
    state, _ = still(still.init(), batch)
    np.testing.assert_array_equal(peaks(state), 0)


@pytest.mark.catches("own-update-reduced-once")
def test_it_is_refused_where_each_device_has_gradients_of_its_own():
    batch = BatchConfig(accumulation=2, reduce_once=True)
    with pytest.raises(PlanError, match="w/peak has a rule of its own, which needs the gradient"):
        step_of(preset("zero1").replace(mesh={"data": 2}, batch=batch))


@pytest.mark.catches("own-update-streamed")
@pytest.mark.catches("own-update-in-a-layers-norm")
@pytest.mark.parametrize(
    "offload",
    [
        OffloadConfig(parameters=1.0, optimizer=1.0),
        OffloadConfig(parameters=1.0, optimizer=1.0, clipping="two_pass"),
        OffloadConfig(optimizer=1.0, clipping="stack"),
    ],
    ids=["stack by default", "two passes", "kept"],
)
def test_layers_that_are_updated_one_by_one_do_as_all_at_once(offload):
    plan = Plan(mesh={"fsdp": 2})
    whole = step_of(plan, clip_norm=0.1)
    streamed = step_of(plan.replace(offload=offload), clip_norm=0.1)
    state, other = whole.init(), streamed.init()
    for batch in batches(3):
        state, metrics = whole(state, batch)
        other, found = streamed(other, batch)
        np.testing.assert_allclose(found["loss"], metrics["loss"], rtol=1e-6)
        np.testing.assert_allclose(found["grad_norm"], metrics["grad_norm"], rtol=1e-6)
        np.testing.assert_allclose(peaks(other), peaks(state), rtol=1e-6)


@pytest.mark.catches("own-update-by-the-cpu")
def test_it_is_refused_where_the_cpu_updates():
    offload = OffloadConfig(parameters=1.0, optimizer=1.0, cpu_update=1.0, clipping="stack")
    plan = Plan(mesh={"fsdp": 1}, offload=offload)
    with pytest.raises(PlanError, match="'layers/map/w/peak' has an update of its own, and"):
        step_of(plan)
