"""Stages with programs of their own, whose state and activations are in host memory.

The default run takes a few cases, `-m sweep` all others.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.config import BatchConfig, OffloadConfig, Segment
from colossax.errors import PlanError
from colossax.models import maker
from colossax.optim import adamw, lamb
from colossax.pipeline import Kind, schedule
from colossax.planner import boost
from colossax.step.programs import waiting
from colossax.tasks import next_token_loss
from tests.oracle import assert_losses_close, assert_trees_close
from tests.step import test_parallel_oracle as oracle
from tests.step.stages.test_programs import cut, start, uneven
from tests.step.stages.test_programs_once import once
from tests.step.stages.test_stages import MODELS, devices_of, step_of

PLANS = {
    "two": uneven({"stage": 2, "fsdp": 2}, 5, 3),
    "once": once({"stage": 2, "fsdp": 4}, 5, 3),
    "four": uneven({"stage": 4, "fsdp": 2}, 3, 2, 2, 1),
    "chunks": uneven({"stage": 2, "tensor": 2}, 1, 3, 2, 2, chunks=2, name="zero3+megatron"),
    "zb_v": uneven({"stage": 2}, 1, 3, 2, 2, schedule="zb_v"),
    "all kept": uneven({"stage": 2, "ring": 2}, 3, 5, segments=(Segment(),)),
}


def started(plan, make=adamw):
    step = step_of("packed", plan, devices_of(plan), make(1e-2, eps=1e-3))
    params = cut(start("packed"), plan)
    return step.init_from(jax.device_put(params, step.shardings["params"])), step


def trained(plan, make=adamw, steps=3):
    """Losses and norms, and arrays of the state."""
    state, step = started(plan, make)
    told = []
    for _ in range(steps):
        state, metrics = step(state, oracle.batch("packed", rows=8))
        told.append([float(metrics[name]) for name in ("loss", "grad_norm")])
    return np.array(told), arrays(state), state, step


def arrays(state):
    return jax.tree.map(np.asarray, (state["params"], state["opt_state"]))


@functools.cache
def on_devices(name, make):
    return trained(PLANS[name], make)[:2]


def assert_as_on_devices(name, offload, make=adamw):
    plan = PLANS[name].replace(offload=OffloadConfig().with_text(offload))
    told, found, state, step = trained(plan, make)
    want, right = on_devices(name, make)
    np.testing.assert_allclose(told, want, rtol=1e-6)
    assert_trees_close(found, right)
    return state, step


def kinds(tree):
    """Memories of arrays with three dims or more, which are layers' matrices."""
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim > 2}


@pytest.mark.catches("programs-read-stand-ins")
def test_all_of_it_in_host_memory_and_on(tmp_path):
    state, step = assert_as_on_devices("two", "parameters=1,optimizer=1,activations=1")
    assert kinds(state["opt_state"]) == kinds(state["params"]) == {"pinned_host"}
    step.save(tmp_path, state)
    again = step.restore(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, arrays(again), arrays(state))
    assert kinds(again["opt_state"]) == {"pinned_host"}
    elsewhere = started(PLANS["four"])[1]
    batch = oracle.batch("packed", rows=8)
    evaluated = [
        np.array(each.evaluate(each.restore(tmp_path), batch)["cross_entropy"])
        for each in (step, elsewhere)
    ]
    assert_losses_close(*evaluated)
    losses = [each(each.restore(tmp_path), batch)[1]["loss"] for each in (step, elsewhere)]
    assert_losses_close(*losses)


SWEPT = [
    ("two", "optimizer=1", lamb),
    ("two", "parameters=1", lamb),
    ("four", "parameters=1,optimizer=1,activations=1", adamw),
    ("chunks", "parameters=1,optimizer=1", adamw),
    ("zb_v", "parameters=1,activations=1", adamw),
    ("all kept", "parameters=1,activations=1", adamw),
    ("once", "optimizer=1,activations=1", adamw),
    ("chunks", "activations=1", adamw),
]


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "offload", "make"), SWEPT)
def test_every_kind_of_state_on_every_mesh(name, offload, make):
    assert_as_on_devices(name, offload, make)


@pytest.mark.catches("programs-nothing-waits-on-host")
@pytest.mark.catches("programs-next-leaves")
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb_v"])
def test_what_waits_is_in_host_memory_but_for_the_next(name):
    chunks = 1 if name in ("gpipe", "1f1b") else 2
    table = schedule(name, 2, 6, chunks, "free")
    held = waiting.Waiting(table, [True] * len(table.layout))
    operations = [(s, op, table.position(s, op.chunk)) for _, s, op in table.operations()]
    back = [
        [(p, op.microbatch) for s, op, p in operations if s == at and op.kind in waiting.BACK]
        for at in range(2)
    ]
    there = [{}, {}]
    for stage, op, position in operations:
        key = position, op.microbatch
        if op.kind is Kind.FORWARD:
            held.put(*key, [jnp.full(3, 10.0 * position + op.microbatch)])
            there[stage][key] = None
        elif op.kind in waiting.BACK:
            (found,) = held.take(*key)
            np.testing.assert_array_equal(found, np.full(3, 10.0 * position + op.microbatch))
            assert found.sharding.memory_kind == "device"
            del there[stage][key]
            back[stage].remove(key)
        for key in there[stage]:
            (found,) = held.kept(*key)
            near = key == back[stage][0]
            assert found.sharding.memory_kind == ("device" if near else "pinned_host")


REFUSED = {
    "a part of the layers": ({"optimizer": 0.5}, "optimizer: .* give 0 or 1"),
    "fused": ({"fused": True}, "fused: with 2 stages stages have all gradients"),
    "disk": ({"optimizer": 1.0, "disk": 1.0}, "no state in a file; give disk 0"),
}


@pytest.mark.parametrize(("offload", "message"), REFUSED.values(), ids=REFUSED)
def test_what_programs_of_stages_cannot_place_is_refused(offload, message):
    plan = PLANS["two"].replace(offload=OffloadConfig(**offload))
    with pytest.raises(PlanError, match=message):
        started(plan)


def test_weights_that_are_gathered_once_are_on_the_devices():
    plan = PLANS["once"].replace(batch=BatchConfig(), offload=OffloadConfig(parameters=1.0))
    with pytest.raises(PlanError, match="weights gathered once a step are on the devices"):
        started(plan)


@pytest.mark.catches("programs-shards-in-host-memory")
def test_weights_of_which_devices_have_gradients_of_their_own_are_on_the_devices():
    plan = uneven({"stage": 2, "data": 2}, 5, 3, name="ddp").replace(
        batch=BatchConfig(reduce_once=True), offload=OffloadConfig(parameters=1.0)
    )
    with pytest.raises(PlanError, match="switch plan.batch.reduce_once off"):
        started(plan)


def test_shares_are_not_searched_for():
    plan = PLANS["two"].replace(offload=OffloadConfig(auto=True))
    shapes = {"tokens": jax.ShapeDtypeStruct((8, 32), np.int32)}
    with pytest.raises(PlanError, match="auto: with 2 stages shares are not searched for"):
        boost(
            maker(MODELS["llama"]),
            adamw(1e-2),
            next_token_loss(),
            plan,
            devices=devices_of(plan),
            shapes=shapes,
        )


@pytest.mark.catches("programs-keep-by-name")
def test_what_layers_keep_by_name_is_refused():
    plan = PLANS["two"].replace(segments=(Segment(remat="full", offload="input"),))
    with pytest.raises(PlanError, match="all that they keep goes to host memory; give activations"):
        started(plan)
