"""What else a step does beside gradients, under stages: equal to one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from colossax.config import BatchConfig, Plan, preset
from colossax.optim import adamw, lamb, sgd
from colossax.planner import build_step
from tests.oracle import assert_losses_close, assert_trees_close
from tests.step.offloaded.streamed import CONFIG, FULL, batch, by_path, started, stepped
from tests.step.stages.test_stages import Stacked, counted_loss, devices_of, piped

STAGES = {"stage": 2, "fsdp": 2, "tensor": 2}


def run(plan, optimizer, **options):
    devices = devices_of(plan) if plan.mesh else jax.devices()[:1]
    state, step = started(plan, optimizer, model=CONFIG, devices=devices, **options)
    state, found = stepped(state, step, steps=3)
    return by_path(step, state["params"]), found


CASES = {
    "adamw": (adamw(1e-2, eps=1e-3), {"clip_norm": 0.5}),
    "sgd with momentum": (sgd(1e-1, momentum=0.9), {"clip_norm": 0.01}),
    "lamb": (lamb(1e-2, eps=1e-5), {"clip_norm": 0.5}),
    "lamb, nothing clipped": (lamb(1e-2, eps=1e-5), {}),
    "a filter": (lamb(1e-2, eps=1e-5), {"trainable": lambda info: info.path != "embed/table"}),
}


@functools.cache
def truth(case):
    optimizer, options = CASES[case]
    return run(FULL, optimizer, **options)


def assert_trains_as_one_device(plan, case):
    optimizer, options = CASES[case]
    params, found = run(plan, optimizer, **options)
    wanted, want = truth(case)
    assert [one.keys() for one in found] == [one.keys() for one in want]
    for name in want[0]:
        assert_losses_close([one[name] for one in found], [one[name] for one in want])
    assert_trees_close(params, wanted)


def test_lamb_with_clipping_by_the_global_norm():
    """A term of its own weight (z-loss) among them, and microsteps around the pipeline."""
    plan = preset("zero3+megatron", mesh=STAGES, batch=BatchConfig(accumulation=2), **piped(2))
    assert_trains_as_one_device(plan, "lamb")


PLANS = {
    "1f1b": Plan(mesh={"stage": 4}, **piped(4)),
    "chunks": Plan(mesh={"stage": 2, "data": 2}, **piped(4, chunks=2)),
    "zero2": preset("zero2+megatron", mesh=STAGES, **piped(2)),
    "as many as batch.microbatch says": Plan(
        mesh={"stage": 2, "fsdp": 2}, batch=BatchConfig(microbatch=1)
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_every_optimizer_trains_as_on_one_device(plan, case):
    assert_trains_as_one_device(plan, case)


def counted(variables, sums):
    """Layers' loads so far, and how often they were counted."""
    total, weight = sums["load"]
    return {"load": variables["load"] + total / weight, "steps": variables["steps"] + 1}


def loads(plan, accumulation=1):
    x = np.random.default_rng(0).standard_normal((3, 8, 4)).astype(np.float32)
    step = build_step(
        Stacked,
        optax.sgd(1e-1),
        counted_loss,
        plan.replace(batch=BatchConfig(accumulation=accumulation)),
        devices=devices_of(plan) if plan.mesh else jax.devices()[:1],
        batch_dims={"x": ("batch", "embed")},
        variables={"load": jnp.zeros(4), "steps": jnp.int32(0)},
        after_step=counted,
    )
    state = step.init(0)
    found = []
    for each in x:
        state, metrics = step(state, {"x": each})
        found.append({name: np.asarray(value) for name, value in metrics.items()})
    return jax.tree.map(np.asarray, state["variables"]), found


@pytest.mark.parametrize(
    ("chunks", "accumulation"),
    [(1, 2), pytest.param(2, 1, marks=pytest.mark.sweep)],
)
def test_what_is_counted_reaches_after_step(chunks, accumulation):
    """Of all layers, of all microbatches, once a step; the loss has two terms of those sums."""
    want, metrics = loads(Plan())
    plan = Plan(mesh={"stage": 2, "data": 2}, **piped(2, chunks=chunks))
    found, piped_metrics = loads(plan, accumulation)
    assert found["steps"] == want["steps"] == 3
    np.testing.assert_allclose(found["load"], want["load"], rtol=1e-5)
    for one, other in zip(piped_metrics, metrics, strict=True):
        for name in ("loss", "square", "balance", "load", "grad_norm", "tokens"):
            np.testing.assert_allclose(one[name], other[name], rtol=1e-5)


@pytest.mark.sweep
def test_a_step_that_is_not_finite_changes_nothing():
    plan = preset("zero3+megatron", mesh=STAGES, **piped(2))
    state, step = started(plan, adamw(1e-2), model=CONFIG, devices=devices_of(plan))
    leaf = state["params"]["norm"]["scale"]
    state["params"]["norm"]["scale"] = leaf.at[0].set(jnp.nan)
    before = jax.tree.map(np.asarray, (state["params"], state["opt_state"]))
    state, metrics = step(state, batch(0))
    assert metrics["skipped"] == 1
    after = jax.tree.map(np.asarray, (state["params"], state["opt_state"]))
    jax.tree.map(np.testing.assert_array_equal, after, before)
