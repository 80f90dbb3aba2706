"""Delayed float8 scales in stages: histories are those of one device, whatever the schedule."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from colossax.config import (
    BatchConfig,
    Float8,
    OffloadConfig,
    PipelineConfig,
    Plan,
    Precision,
    Segment,
)
from colossax.errors import PlanError
from colossax.nn import LayerStack, Linear
from colossax.optim import adamw
from colossax.planner import build_step

DELAYED = Precision(matmul="float8", float8=Float8(scaling="delayed", history=3))
WIDTH, ROWS, COUNT = 8, 16, 4


class Layer(nnx.Module):
    """What it adds is a function of two maps."""

    def __init__(self, rngs):
        dims = ("embed", "mlp"), ("mlp", "embed")
        self.up, self.down = (Linear((WIDTH, WIDTH), each, rngs=rngs, std=0.5) for each in dims)

    def __call__(self, x, side, state):
        return x + self.down(jnp.tanh(self.up(x))), state, {}


class Chained(nnx.Module):
    """A map, layers, a map."""

    around = False

    def __init__(self, rngs):
        dims = ("channels", "embed"), ("embed", "channels")
        self.first, self.last = (Linear((WIDTH, WIDTH), each, rngs=rngs, std=0.5) for each in dims)
        self.layers = LayerStack(lambda rngs: Layer(rngs), 4, rngs=rngs)

    def __call__(self, x):
        start = self.first(x)
        end = self.layers(start).carry
        return self.last(end + start if self.around else end)


class Around(Chained):
    """What enters the layers goes around them, too."""

    around = True


def loss(model, batch):
    y = model(batch["x"])
    return {"squares": (jnp.sum((y - 1) ** 2), jnp.float32(len(y)), 1.0)}, {}


def step_of(mesh, *, model=Chained, **plan):
    """The batch in `COUNT` microbatches."""
    return build_step(
        model,
        adamw(1e-2),
        loss,
        Plan(mesh=mesh, precision=DELAYED, batch=BatchConfig(accumulation=COUNT), **plan),
        devices=jax.devices()[: math.prod(mesh.values())],
        batch_dims={"x": ("batch", "channels")},
        clip_norm=1.0,
    )


def given(seed):
    """Of which each microbatch has another largest number."""
    draw = np.random.default_rng(seed)
    return {"x": draw.standard_normal((ROWS, WIDTH)).astype(np.float32)}


def run(step, state, steps, first=0):
    """Losses and norms, and the state."""
    found = []
    for seed in range(first, first + steps):
        state, metrics = step(state, given(seed))
        found.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return np.array(found), state


def histories(step, state):
    """By path, `[layers, 3, steps]`, of what is in no stack one of them."""
    found = {}
    pairs = zip(jax.tree.leaves(step.spec.infos), jax.tree.leaves(state["params"]), strict=True)
    for info, leaf in pairs:
        if info.noted:
            rows = np.asarray(leaf).reshape(-1, *leaf.shape[-2:])
            found.setdefault(info.path, []).append(rows)
    return {path: np.concatenate(parts) for path, parts in found.items()}


@functools.cache
def alone():
    """One device: losses and norms of three steps, and the histories after them."""
    step = step_of({"fsdp": 1})
    found, state = run(step, step.init(), 3)
    return found, histories(step, state)


def piped(schedule, chunks=1, **more):
    return {"pipeline": PipelineConfig(schedule=schedule, chunks=chunks, **more)}


FULL = (Segment(remat="full"),)
HOSTED = OffloadConfig(parameters=1.0, optimizer=1.0)
QUICK = {
    "zb_v": ({"stage": 2, "fsdp": 2}, piped("zb_v", 2)),
    "programs": ({"stage": 2, "fsdp": 2}, piped("1f1b", cuts=(3, 1))),
}
CASES = {
    "1f1b": ({"stage": 2}, piped("1f1b")),
    "gpipe": ({"stage": 4}, piped("gpipe")),
    "interleaved": ({"stage": 2}, piped("interleaved", 2)),
    "zb_h1, recomputed": ({"stage": 2}, {**piped("zb_h1"), "segments": FULL}),
    "zb_h1": ({"stage": 4, "fsdp": 2}, piped("zb_h1")),
    "gathered": ({"stage": 2, "fsdp": 2}, piped("1f1b", gather="step")),
    "tensor": ({"stage": 2, "tensor": 2}, {**piped("1f1b"), "segments": FULL}),
    "policies": (
        {"stage": 2},
        {"segments": (Segment(count=1, remat="full"), Segment(count=1, remat="none"))},
    ),
    "programs, zb_h1": ({"stage": 2}, piped("zb_h1", cuts=(1, 3))),
    "programs, zb_v": ({"stage": 2}, piped("zb_v", 2, cuts=(1, 1, 1, 1))),
    "programs, gathered": ({"stage": 2, "fsdp": 2}, piped("1f1b", cuts=(2, 2), gather="step")),
    "optimizer in host memory": (
        {"stage": 2, "fsdp": 2},
        {"offload": OffloadConfig(optimizer=1.0)},
    ),
    "host": ({"stage": 2}, {"offload": HOSTED, "segments": FULL}),
    "activations in host memory": ({"stage": 2}, {"offload": OffloadConfig(activations=1.0)}),
    "programs, host": ({"stage": 2}, {**piped("1f1b", cuts=(2, 2)), "offload": HOSTED}),
}


@pytest.mark.catches("float8-notes-of-stages-added")
@pytest.mark.catches("float8-notes-of-empty-cells")
@pytest.mark.catches("float8-notes-of-programs-added")
@pytest.mark.catches("float8-notes-outside-added")
@pytest.mark.parametrize(("mesh", "plan"), QUICK.values(), ids=QUICK)
def test_histories_are_those_of_one_device(mesh, plan):
    """Of all matrices, in the stack and beside it: the largest numbers of all microbatches."""
    assert_equals_one_device(mesh, plan)


@pytest.mark.sweep
@pytest.mark.parametrize(("mesh", "plan"), CASES.values(), ids=CASES)
def test_so_they_are_by_every_schedule_and_with_layers_in_host_memory(mesh, plan):
    assert_equals_one_device(mesh, plan)


def assert_equals_one_device(mesh, plan):
    step = step_of(mesh, **plan)
    got, state = run(step, step.init(), 3)
    want, noted = alone()
    np.testing.assert_allclose(got, want, rtol=1e-5)
    found = histories(step, state)
    assert found.keys() == noted.keys() and len(noted) == 4
    for path, history in noted.items():
        assert np.all(history > 0)
        np.testing.assert_allclose(found[path], history, rtol=1e-5, err_msg=path)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["1f1b", "zb_v", "programs"])
def test_a_run_goes_on_exactly_and_on_another_mesh(name, tmp_path):
    mesh, plan = {**QUICK, **CASES}[name]
    step = step_of(mesh, **plan)
    _, state = run(step, step.init(), 2)
    step.save(tmp_path, state)
    saved = histories(step, state)
    whole, state = run(step, state, 2, first=2)
    again, ended = run(step, step.restore(tmp_path), 2, first=2)
    np.testing.assert_array_equal(again, whole)
    jax.tree.map(np.testing.assert_array_equal, histories(step, ended), histories(step, state))
    other = step_of({"fsdp": 2, "tensor": 2})
    moved = other.restore(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, histories(other, moved), saved)
    np.testing.assert_allclose(run(other, moved, 2, first=2)[0], whole, rtol=1e-4)


@pytest.mark.catches("float8-parts-of-a-gradient-noted")
@pytest.mark.parametrize("cuts", [None, (2, 2)], ids=["one program", "programs"])
def test_a_matrix_of_which_two_parts_read_what_it_gives_is_refused(cuts):
    """Each would note its own part of the gradient, and neither that of their sum."""
    step = step_of({"stage": 2}, model=Around, pipeline=PipelineConfig(cuts=cuts))
    message = "several parts of the pipeline multiply by 'first', of which each knows a part"
    with pytest.raises(PlanError, match=message):
        step(step.init(), given(0))
