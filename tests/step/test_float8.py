"""Steps whose matmuls are in float8: every mesh as one device, histories, what is refused."""

import dataclasses
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
    preset,
)
from colossax.errors import InputError, PlanError
from colossax.inference.plan import inference_plan
from colossax.models import MixtralConfig, maker
from colossax.nn import Linear, with_weights
from colossax.optim import adamw, sgd
from colossax.pallas.target import target
from colossax.planner import build_step
from colossax.tasks import next_token_loss
from tests.cases import quick_first
from tests.step.test_step import CONFIG, text_batch

HOSTED = OffloadConfig(parameters=1.0, optimizer=1.0)
CURRENT = Precision(matmul="float8")
DELAYED = Precision(matmul="float8", float8=Float8(scaling="delayed", history=3))


def step_of(mesh, precision=CURRENT, *, config=CONFIG, make=None, optimizer=None, **plan):
    return build_step(
        make or maker(config),
        optimizer or adamw(1e-2),
        next_token_loss(z_loss=1e-3),
        Plan(mesh=mesh, precision=precision, **plan),
        devices=jax.devices()[: math.prod(mesh.values())],
        clip_norm=1.0,
    )


def run(step, state, steps, first=0):
    """Losses and norms, and the state."""
    found = []
    for number in range(first, first + steps):
        state, metrics = step(state, text_batch(rows=16, seed=number))
        found.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return np.array(found), state


def histories(step, state):
    """By path, `[layers, 3, steps]`; of a stack in several segments, one behind the other."""
    found = {}
    pairs = zip(jax.tree.leaves(step.spec.infos), jax.tree.leaves(state["params"]), strict=True)
    for info, leaf in pairs:
        if info.noted:
            found.setdefault(info.path, []).append(np.asarray(leaf).reshape(-1, *leaf.shape[-2:]))
    return {path: np.concatenate(parts) for path, parts in found.items()}


@functools.cache
def alone(precision, rows=16):
    """One device, a microbatch of so many rows: losses and norms of three steps."""
    step = step_of({"fsdp": 1}, precision, batch=BatchConfig(accumulation=16 // rows))
    return run(step, step.init(), 3)[0]


REMAT = (Segment(remat="full"),)
TWICE = BatchConfig(accumulation=2)
MESHES = {
    "data": ({"data": 2}, 16, {}),
    "fsdp": ({"fsdp": 4}, 16, {}),
    "remat": ({"fsdp": 4}, 16, {"segments": REMAT}),
    "tensor": ({"fsdp": 2, "tensor": 2}, 16, {"segments": REMAT}),
    "ring": ({"ring": 2, "fsdp": 2}, 16, {}),
    "ulysses": ({"ulysses": 2, "tensor": 2}, 16, {}),
    "accumulation": ({"fsdp": 4}, 8, {"batch": TWICE}),
    "reduce_once": (
        {"fsdp": 4},
        8,
        {"rules": preset("zero1").rules, "batch": dataclasses.replace(TWICE, reduce_once=True)},
    ),
    "stages": ({"stage": 2}, 4, {"batch": BatchConfig(accumulation=4)}),
    "stages_fsdp": ({"stage": 2, "fsdp": 2}, 4, {"batch": BatchConfig(accumulation=4)}),
    "stages_gathered": (
        {"stage": 2, "fsdp": 2},
        4,
        {"batch": BatchConfig(accumulation=4), "pipeline": PipelineConfig(gather="step")},
    ),
    "zero_bubble": (
        {"stage": 2},
        4,
        {"batch": BatchConfig(accumulation=4), "pipeline": PipelineConfig(schedule="zb_h1")},
    ),
    "programs": (
        {"stage": 2, "fsdp": 2},
        4,
        {"batch": BatchConfig(accumulation=4), "pipeline": PipelineConfig(cuts=(1, 1))},
    ),
    "host": ({"fsdp": 2}, 16, {"offload": HOSTED, "segments": REMAT}),
    "host_twice": ({"fsdp": 2}, 8, {"offload": HOSTED, "segments": REMAT, "batch": TWICE}),
}

UNDELAYED = {"reduce_once", "host_twice"}


CASES = [
    (name, scaling)
    for scaling in ("current", "delayed")
    for name in MESHES
    if scaling == "current" or name not in UNDELAYED
]


class OneMap(nnx.Module):
    """Nothing norms what it multiplies."""

    def __init__(self, rngs):
        self.map = Linear((4, 4), ("embed", "mlp"), rngs=rngs)


@pytest.mark.catches("float8-scale-of-a-device")
@pytest.mark.parametrize("devices", [1, 2])
def test_devices_that_reduce_once_scale_by_the_rows_of_all(devices):
    """Beside the rows of the other device, those of one are so small that float8 has 0 for them."""

    def loss(model, batch):
        y = model.map(batch["x"])
        small = jnp.sum(jnp.abs(y) * (jnp.abs(batch["x"]) < 1))
        rows = jnp.float32(len(y))
        return {"squares": (jnp.sum(y * y), rows, 1.0)}, {"small": (small, rows)}

    step = build_step(
        OneMap,
        sgd(1e-2),
        loss,
        Plan(
            mesh={"data": devices},
            rules=preset("zero1").rules,
            batch=BatchConfig(accumulation=2, reduce_once=True),
            precision=CURRENT,
        ),
        devices=jax.devices()[:devices],
        batch_dims={"x": ("batch", "embed")},
    )
    x = np.repeat(np.float32([1.0, 1e-6]), 4)[:, None] * np.ones((8, 4), np.float32)
    _, told = step(step.init(), {"x": x})
    assert float(told["squares"]) > 0 and float(told["small"]) == 0


@pytest.mark.parametrize(("name", "scaling"), quick_first(CASES, [("tensor", "current")]))
def test_every_mesh_trains_as_one_device(name, scaling):
    """Roundings are the same. Sums over devices differ in the last bit of float32, and where one
    lies between two numbers of float8 that bit decides: below 1e-4 of a norm after two updates."""
    precision = {"current": CURRENT, "delayed": DELAYED}[scaling]
    mesh, rows, plan = MESHES[name]
    step = step_of(mesh, precision, **plan)
    got, want = run(step, step.init(), 3)[0], alone(precision, rows)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    np.testing.assert_allclose(got, want, rtol=1e-4)


@pytest.mark.sweep
@pytest.mark.catches("float8-multiplies-as-before")
def test_it_is_near_the_compute_dtype_and_not_the_same():
    wide = alone(Precision())
    for precision in (CURRENT, DELAYED):
        differs = np.abs(alone(precision)[:, 0] / wide[:, 0] - 1)
        assert np.all(differs < 2e-3) and np.all(differs > 1e-7), differs


def test_matrices_that_are_to_keep_the_compute_dtype_do():
    dims = ("embed", "heads", "kv_heads", "mlp", "vocab")
    with pytest.raises(PlanError, match="no matrix of the model would be: those it multiplies by"):
        step_of({"fsdp": 1}, Precision(matmul="float8", float8=Float8(keep=dims)))
    some = Precision(matmul="float8", float8=Float8(scaling="delayed", keep=("mlp", "vocab")))
    step = step_of({"fsdp": 1}, some)
    paths = {info.path for info in jax.tree.leaves(step.spec.infos) if info.noted}
    assert paths == {f"layers/attn/{name}/history" for name in "qkvo"}


@pytest.mark.sweep
@pytest.mark.catches("float8-notes-are-added")
def test_over_microbatches_the_largest_is_noted():
    """As of the whole batch at once, whose largest number is the largest of its parts."""
    whole, parts = (
        step_of({"fsdp": 1}, DELAYED, batch=BatchConfig(accumulation=n)) for n in (1, 4)
    )
    want, got = (histories(s, run(s, s.init(), 1)[1]) for s in (whole, parts))
    assert (
        len(want) == 7
        and whole.spec.parameter_count() == step_of({"fsdp": 1}).spec.parameter_count()
    )
    for path, history in want.items():
        assert history.shape == (CONFIG.layers, 3, 3)
        assert np.all(history[..., 0] > 0) and not np.any(history[..., 1:])
        np.testing.assert_allclose(got[path], history, rtol=1e-5)


def test_a_step_that_is_skipped_notes_nothing():
    step = step_of({"fsdp": 1}, DELAYED)
    _, state = run(step, step.init(), 1)
    before = histories(step, state)
    params = jax.tree.map(lambda x: x, state["params"])
    params["norm"]["scale"] = params["norm"]["scale"] * np.inf
    _, after = run(step, {**state, "params": params}, 1)
    assert after["skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, histories(step, after), before)


@pytest.mark.sweep
@pytest.mark.catches("float8-history-not-saved")
def test_histories_are_resumed_exactly_and_restored_onto_another_mesh(tmp_path):
    step = step_of({"fsdp": 4}, DELAYED)
    _, state = run(step, step.init(), 2)
    step.save(tmp_path, state)
    saved = histories(step, state)
    whole, state = run(step, state, 3, first=2)
    again, ended = run(step, step.restore(tmp_path), 3, first=2)
    np.testing.assert_array_equal(again, whole)
    jax.tree.map(np.testing.assert_array_equal, histories(step, ended), histories(step, state))
    other = step_of({"fsdp": 2, "tensor": 2}, DELAYED)
    moved = other.restore(tmp_path)
    assert all(np.count_nonzero(h) == 2 * h[..., 0].size for h in saved.values())
    jax.tree.map(np.testing.assert_array_equal, histories(other, moved), saved)
    np.testing.assert_allclose(run(other, moved, 3, first=2)[0], whole, rtol=1e-4)


@pytest.mark.sweep
def test_a_state_without_histories_gets_empty_ones_and_one_with_them_can_do_without(tmp_path):
    step, plain = step_of({"fsdp": 2}, DELAYED), step_of({"fsdp": 2}, Precision())
    plain.save(tmp_path / "plain", plain.init(0))
    begun = step.restore(tmp_path / "plain")
    assert not any(map(np.any, histories(step, begun).values()))
    _, state = run(step, begun, 1)
    step.save(tmp_path / "float8", state)
    moments = plain.restore(tmp_path / "float8")["opt_state"], state["opt_state"]
    jax.tree.map(np.testing.assert_array_equal, *map(jax.tree.leaves, moments))


def test_sequences_are_generated_in_the_compute_dtype():
    plan = Plan(precision=DELAYED)
    assert inference_plan(plan).precision == dataclasses.replace(DELAYED, matmul="compute")


class Plain(nnx.Module):
    """A model that knows nothing of the library."""

    def __init__(self, rngs):
        self.table = nnx.Embed(64, 16, rngs=rngs)
        self.head = nnx.Linear(16, 64, rngs=rngs)


class Twice(nnx.Module):
    """Another kind of weight."""

    def __init__(self, module):
        self.base, self.dims = module.held, module.dims
        self.weight = module.weight


MIXTURE = MixtralConfig(
    vocab=64, embed=16, layers=1, heads=2, kv_heads=2, mlp=32, max_seq=32, experts=4
)
REFUSED = {
    "which cpu .compute capability 8.0. does not multiply": {"on": (8, 0)},
    "which cpu does not multiply": {"on": None},
    "beside tensor_layout '1d' and tensor_matmul 'overlap'": {
        "mesh": {"tensor": 2},
        "tensor_matmul": "overlap",
    },
    "beside tensor_layout '2d' and tensor_matmul 'auto'": {
        "mesh": {"row": 2, "col": 2},
        "tensor_layout": "2d",
    },
    "no matrix of the model would be: .* there are none": {
        "make": lambda rngs: Plain(rngs),
        "optimizer": sgd(1.0),
    },
    "is of experts, whose matmuls are not done in float8; add 'experts' to": {"config": MIXTURE},
    "and layers with several microbatches are in host memory": {
        "precision": DELAYED,
        "offload": HOSTED,
        "batch": TWICE,
    },
    "reduce_once: layers/attn/k/history has a rule of its own": {
        "precision": DELAYED,
        "mesh": {"data": 2},
        "batch": dataclasses.replace(TWICE, reduce_once=True),
    },
}


@pytest.mark.catches("float8-anywhere")
@pytest.mark.parametrize("message", REFUSED)
def test_what_it_does_not_go_with_is_refused(message):
    how = {"mesh": {"fsdp": 1}, **REFUSED[message]}
    if "on" not in how:
        with pytest.raises(PlanError, match=message):
            step_of(**how)
        return
    with target("gpu", compute_capability=how.pop("on")), pytest.raises(PlanError, match=message):
        step_of(**how)


def test_experts_may_stay_out():
    """What beside them is dense is in float8."""
    keep = Precision(matmul="float8", float8=Float8(keep=("vocab", "experts")))
    step_of({"fsdp": 1}, keep, config=MIXTURE)


def test_a_weight_of_another_kind_would_not_read_its_history():
    make = with_weights(
        maker(CONFIG), lambda name, module, rngs: Twice(module) if name == "attn/q" else None
    )
    with pytest.raises(InputError, match="'attn/q' has a history of float8 scales, which a Twice"):
        step_of({"fsdp": 1}, DELAYED, make=make)


def test_settings_are_held_to_what_there_is():
    cases = {
        "precision.matmul: found 'float8' beside compute 'float16'": {
            "matmul": "float8",
            "compute": "float16",
        },
        "precision.matmul: unknown 'fp8'": {"matmul": "fp8"},
        "precision.float8.scaling: unknown 'delay'; did you mean 'delayed'": {
            "float8": {"scaling": "delay"}
        },
        "precision.float8.history: found 0; give 1 or more": {"float8": {"history": 0}},
    }
    for message, fields in cases.items():
        with pytest.raises(PlanError, match=message):
            nested = {"float8": Float8(**fields["float8"])} if "float8" in fields else {}
            Precision(**{**fields, **nested})


def test_names_that_keep_the_compute_dtype_may_be_one_text():
    """As on the command line; and a plan comes back from JSON, as a resumed run's does."""
    plan = Plan(precision=Precision(matmul="float8", float8=Float8(keep="vocab, mlp")))
    assert plan.precision.float8.keep == ("vocab", "mlp")
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(PlanError, match="precision.float8.keep: found 3; give names of dims, as"):
        Float8(keep=3)
