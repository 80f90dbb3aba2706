"""An encoder and a decoder, cut into stages that have programs of their own, equal one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from colossax.config import PipelineConfig, Plan
from colossax.errors import PlanError
from colossax.nn import LayerStack, param
from colossax.optim import adamw
from colossax.planner import build_step
from tests.oracle import assert_trees_close
from tests.step import test_parallel_oracle as oracle
from tests.step.stages.test_stages import devices_of

EMBED, VOCAB = 8, 12


def weight(rngs, *shape, dims):
    return param(0.5 * jax.random.normal(rngs.params(), shape), dims)


class Reading(nnx.Module):
    """A layer of the encoder: what it gets of a parameter is the same for all; it counts."""

    def __init__(self, *, rngs):
        self.w = weight(rngs, EMBED, EMBED, dims=("embed", "mlp"))

    def __call__(self, x, bias, state):
        x = jnp.tanh(x @ self.w[...] + bias)
        return x, state, {"load": jnp.sum(jnp.square(x))}


class Writing(nnx.Module):
    """A layer of the decoder, which reads what the encoder gave."""

    def __init__(self, *, rngs):
        self.w = weight(rngs, EMBED, EMBED, dims=("embed", "mlp"))
        self.read = weight(rngs, EMBED, EMBED, dims=("embed", "mlp"))

    def __call__(self, x, side, state):
        memory, bias = side
        weights = jax.nn.softmax(jnp.einsum("bse,bte->bst", x @ self.read[...], memory))
        x = jnp.tanh(x @ self.w[...] + bias) + jnp.einsum("bst,bte->bse", weights, memory)
        return x, state, {"load": jnp.sum(jnp.abs(x))}


class Both(nnx.Module):
    """One table looks tokens up for both stacks and is the head; one bias goes to all layers."""

    def __init__(self, rngs, swapped=False):
        self.table = weight(rngs, VOCAB, EMBED, dims=("vocab", "embed"))
        self.bias = weight(rngs, EMBED, dims=("embed",))
        self.norm = weight(rngs, EMBED, dims=("embed",))

        def encoder():
            self.encoder = LayerStack(lambda rngs: Reading(rngs=rngs), 4, rngs=rngs)

        def decoder():
            self.decoder = LayerStack(lambda rngs: Writing(rngs=rngs), 4, rngs=rngs)

        for make in (decoder, encoder) if swapped else (encoder, decoder):
            make()


def loss(model, batch):
    table, bias = model.table[...], jnp.tanh(model.bias[...])
    read = model.encoder(table[batch["read"]], bias)
    memory = read.carry * model.norm[...]
    wrote = model.decoder(table[batch["ids"]], (memory, bias))
    logits = wrote.carry @ table.T
    rows = jnp.float32(batch["ids"].shape[0])
    likely = jax.nn.log_softmax(logits)
    picked = jnp.take_along_axis(likely, batch["targets"][..., None], axis=-1)
    loads = jnp.sum(read.sums["load"] * jnp.arange(1.0, 5.0)) + jnp.sum(wrote.sums["load"])
    terms = {
        "entropy": (-jnp.sum(picked), rows, 1.0),
        "balance": (loads, rows, 0.01),
        # Read by the loss past all layers of the decoder.
        "memory": (jnp.sum(jnp.square(memory)), rows, 0.1),
    }
    return terms, {}


def batch():
    draw = np.random.default_rng(0)
    return {name: draw.integers(0, VOCAB, (8, 6)) for name in ("read", "ids", "targets")}


def built(plan, make=Both):
    dims = ("batch", "seq")
    return build_step(
        make,
        adamw(1e-2),
        loss,
        plan,
        devices=devices_of(plan) if plan.mesh else oracle.ONE,
        batch_dims={"read": dims, "ids": dims, "targets": dims},
        clip_norm=0.5,
    )


def trained(plan):
    """Metrics of three steps, and the parameters afterwards, each stack in one piece."""
    step, told = built(plan), []
    state = step.init(0)
    for _ in range(3):
        state, metrics = step(state, batch())
        told.append({name: float(value) for name, value in metrics.items()})
    params = dict(state["params"])
    for stack in ("encoder", "decoder"):
        pieces = list(params[stack]["segments"].values())
        params[stack] = jax.tree.map(lambda *x: np.concatenate([rows(a) for a in x]), *pieces)
    return told, jax.tree.map(np.asarray, params), step.evaluate(state, batch())


def rows(x):
    """`[layers, ...]` of a segment of one layer or of several."""
    return np.asarray(x).reshape(-1, EMBED, EMBED)


@functools.cache
def truth():
    return trained(Plan())


CUTS = {
    "a chunk of both": ({"stage": 2, "fsdp": 2}, {"cuts": (5, 3)}),
    "several of each": ({"stage": 4, "data": 2}, {"cuts": (3, 1, 2, 2)}),
    "two chunks": ({"stage": 2, "fsdp": 2}, {"cuts": (1, 4, 2, 1), "chunks": 2}),
    "zb_h1": ({"stage": 3}, {"cuts": (3, 2, 3), "schedule": "zb_h1"}),
}


def assert_equals_one_device(mesh, pipeline):
    told, params, evaluated = trained(
        Plan(mesh=mesh, pipeline=PipelineConfig(microbatches=4, **pipeline))
    )
    want, right, whole = truth()
    for step, (found, wanted) in enumerate(zip(told, want, strict=True)):
        for name, value in wanted.items():
            np.testing.assert_allclose(found[name], value, rtol=2e-5, err_msg=f"{name}, {step}")
    assert_trees_close(params, right)
    for name, (total, weight) in whole.items():
        np.testing.assert_allclose(evaluated[name][0] / evaluated[name][1], total / weight, 1e-4)


@pytest.mark.catches("chain-gradient-lost")
def test_an_encoder_and_a_decoder_equal_one_device():
    assert_equals_one_device(*CUTS["a chunk of both"])


@pytest.mark.sweep
@pytest.mark.parametrize(("mesh", "pipeline"), CUTS.values(), ids=CUTS)
def test_cuts_anywhere_in_both_equal_one_device(mesh, pipeline):
    assert_equals_one_device(mesh, pipeline)


@pytest.mark.catches("chain-homes-by-stack")
def test_layers_of_both_live_where_they_are_computed():
    step = built(Plan(mesh={"stage": 4}, pipeline=PipelineConfig(cuts=(3, 1, 2, 2))))
    homes = {}
    for info in jax.tree.leaves(step.spec.infos):
        if info.span is not None:
            (device,) = step.shardings["params"][info.path.split("/")[0]]["segments"][
                info.segment[1]
            ]["w"].device_set
            homes[info.span] = device.id
    assert homes == {(0, 2): 0, (3, 3): 1, (4, 5): 2, (6, 7): 3}


@pytest.mark.catches("chain-order-not-asked")
def test_stacks_made_in_another_order_than_they_are_called_are_refused():
    plan = Plan(mesh={"stage": 2}, pipeline=PipelineConfig(microbatches=4, cuts=(5, 3)))
    step = built(plan, functools.partial(Both, swapped=True))
    with pytest.raises(PlanError, match="another order than the model makes them"):
        step(step.init(0), batch())


def test_cuts_of_another_number_of_layers_are_refused():
    for cuts, found in (((5, 4), 9), ((2, 2), 4)):
        with pytest.raises(PlanError, match=f"are {found} layers, and the model has 8"):
            built(Plan(mesh={"stage": 2}, pipeline=PipelineConfig(cuts=cuts)))
