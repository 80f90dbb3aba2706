"""A layer measured on each device: what runs, how often, where; and what links are given."""

import dataclasses
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from colossax.config import BatchConfig, Plan, Segment
from colossax.errors import InputError, PlanError
from colossax.models import LlamaConfig
from colossax.nn import LayerStack
from colossax.pallas.bench import Effort
from colossax.planner.deciding import measuring
from colossax.planner.deciding.measuring import activation, measure_layer, measure_links
from colossax.recipes import recipe
from colossax.tasks import task_of
from tests.nn.test_kinds import KINDS, ORDERS

QUICK = Effort(seconds=0.001, repeats=3)
MODEL = LlamaConfig(vocab=32, embed=16, layers=4, heads=2, kv_heads=1, mlp=24, max_seq=8)
TINY = recipe("llama_tiny")
DATA = dataclasses.replace(TINY.data, seq_len=8, global_batch=4)
TASK = task_of(TINY.replace(model=MODEL, data=DATA))


@pytest.fixture
def called(monkeypatch):
    """Every function that was timed, by its name, and what it gave; each is said to take 2 s."""
    found = {}

    def timed(functions, sets, effort):
        found.update({name: function(*sets[0]) for name, function in functions.items()})
        return {name: [2.0] * effort.repeats for name in functions}

    monkeypatch.setattr(measuring, "time_calls", timed)
    return found


def norm(tree):
    return sum(float(jnp.sum(jnp.square(x.astype(jnp.float32)))) for x in jax.tree.leaves(tree))


@pytest.mark.catches("measured-flops")
@pytest.mark.catches("measured-backward")
@pytest.mark.catches("measured-on-one")
def test_a_layer_runs_forward_and_backward_on_its_device(called, devices):
    found = measure_layer(TASK, Plan(batch=BatchConfig(microbatch=2)), devices[:3], QUICK)
    assert found.layer == "tokens 2 x 8, float32, remat none"
    assert found.seconds == [[2.0] * 3] * 3
    weights, tokens = 16 * (16 + 8 + 8 + 16) + 3 * 16 * 24, 2 * 8
    scores = 2 * 2 * 2 * 8 * 8 * 16  # queries with keys, and with values, over all pairs
    matmuls = 6 * tokens * weights
    assert matmuls + 3 * scores <= found.flops <= matmuls + 4 * scores, "computed again, or not"
    assert sorted(called) == ["0", "1", "2"]
    for name, (out, params, carry) in called.items():
        assert {d for x in jax.tree.leaves((out, params, carry)) for d in x.devices()} == {
            devices[int(name)]
        }
        assert out.shape == carry.shape == (2, 8, 16)
        assert params["attn"]["q"]["w"].shape == (16, 2, 8)
        assert all(norm(part) > 0 and np.isfinite(norm(part)) for part in (out, params, carry))
        for one, other in zip(
            jax.tree.leaves(called["0"]), jax.tree.leaves(called[name]), strict=True
        ):
            np.testing.assert_allclose(one, other, rtol=1e-6)


def test_what_the_plan_recomputes_is_measured_too(called, devices):
    plan = Plan(segments=(Segment(remat="full"),))
    assert measure_layer(TASK, plan, devices[:1], QUICK).layer.endswith("remat full")


class Mixed(nnx.Module):
    """Layers of two kinds, which count what they do."""

    def __init__(self, order, *, rngs):
        self.layers = LayerStack(KINDS, order, rngs=rngs)


def mixed(order):
    """A task of such a model."""
    shapes = {"x": jax.ShapeDtypeStruct((3, 4), jnp.float32)}

    def loss(model, batch):
        return jnp.sum(model.layers(batch["x"], 0.1).carry)

    def make(rngs):
        return Mixed(order, rngs=rngs)

    return dataclasses.replace(TASK, make_model=make, loss=loss, shapes=shapes)


@pytest.mark.slow
@pytest.mark.catches("measured-mean")
@pytest.mark.parametrize(("order", "mean"), [(ORDERS[0], 2.0), (ORDERS[1], 2 * 2.0 / 6)])
def test_of_layers_that_differ_the_mean_is_told(order, mean, called, devices):
    """Two kinds one after the other; or two groups of three layers, each of which takes 2 s."""
    found = measure_layer(mixed(order), Plan(), devices[:1], QUICK)
    assert found.seconds == [[pytest.approx(mean)] * 3]
    assert all(norm(part) > 0 for part in called["0"])


def test_what_is_handed_on_is_a_microbatch_of_hidden_states(devices):
    found = activation(TASK, Plan(batch=BatchConfig(microbatch=2)), devices[0])
    assert (found.shape, found.dtype) == ((2, 8, 16), jnp.float32)


@pytest.mark.catches("links-stay")
def test_links_lead_from_each_device_to_the_next(called, devices):
    sent = jax.ShapeDtypeStruct((4, 8), jnp.bfloat16)
    found = measure_links(sent, devices[:3], QUICK)
    assert found == {(0, 1): [2.0] * 3, (1, 2): [2.0] * 3}
    assert [called[name].devices() for name in ("0", "1")] == [{devices[1]}, {devices[2]}]
    assert called["0"].shape == (4, 8) and called["0"].dtype == jnp.bfloat16


def test_a_copy_is_a_copy_and_takes_time(devices):
    sent = jax.ShapeDtypeStruct((2**20,), jnp.float32)
    ((pair, seconds),) = measure_links(sent, devices[:2], QUICK).items()
    assert pair == (0, 1)
    # Of the right order, whatever the machine: a unit forgotten is a factor of 1e6.
    assert 1e7 < 2**22 / median(seconds) < 1e13
    source = jax.device_put(jnp.ones(16), devices[0])
    moved = jax.device_put(source, devices[1])
    assert moved.unsafe_buffer_pointer() != source.unsafe_buffer_pointer()


def test_one_device_has_no_link(devices):
    with pytest.raises(InputError, match="there is 1, and a link lies between two"):
        measure_links(jax.ShapeDtypeStruct((4,), jnp.float32), devices[:1], QUICK)


def test_a_task_without_shapes_or_stack_is_refused(devices):
    with pytest.raises(InputError, match="its shapes are empty, and a layer is measured on"):
        measure_layer(dataclasses.replace(TASK, shapes={}), Plan(), devices[:1], QUICK)
    none = dataclasses.replace(TASK, loss=lambda model, batch: jnp.sum(batch["weights"]))
    with pytest.raises(PlanError, match="it calls no layer stack, so there is nothing to cut"):
        measure_layer(none, Plan(), devices[:1], QUICK)
