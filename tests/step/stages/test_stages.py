"""Layers shared by stages equal one device: loss, gradients, steps, evaluation, on any mesh.

The default run takes a case of each kind, `-m sweep` all others.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from colossax.config import (
    AttentionConfig,
    BatchConfig,
    LossConfig,
    PipelineConfig,
    Plan,
    Segment,
    preset,
)
from colossax.errors import InputError, PlanError
from colossax.models import maker
from colossax.nn import LayerStack, param
from colossax.optim import adamw
from colossax.planner import build_step
from colossax.tasks import next_token_loss
from tests.oracle import assert_losses_close, assert_trees_close, factorisations
from tests.step import test_parallel_oracle as oracle

MODELS = {
    name: dataclasses.replace(config, layers=8, embed=16, mlp=24)
    if name != "bloom"
    else dataclasses.replace(config, layers=8, embed=16)
    for name, config in oracle.MODELS.items()
}
MODELS["odd"] = dataclasses.replace(MODELS["gpt2"], vocab=61)
FULL = (Segment(remat="full"),)
ROWS = 16


def step_of(model, plan, devices, optimizer=None):
    loss = next_token_loss(z_loss=1e-3)
    return build_step(
        maker(MODELS[model]), optimizer or optax.sgd(1.0), loss, plan, devices=devices
    )


def devices_of(plan):
    return jax.devices()[: int(np.prod(list(plan.mesh.values())))]


@functools.cache
def start(model):
    """Parameters of one device, none of them 0 or 1."""
    step = step_of(model, Plan(), oracle.ONE)
    noise = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: np.asarray(x) + (noise.normal(size=x.shape) * 0.1).astype(np.float32),
        step.init()["params"],
    )


def in_chunks(params, count):
    """Parameters of a stack as those of its chunks."""
    rows = params["layers"]["segments"][0]
    size = jax.tree.leaves(rows)[0].shape[0] // count
    cut = {
        chunk: jax.tree.map(lambda x, c=chunk: x[c * size : (c + 1) * size], rows)
        for chunk in range(count)
    }
    return {**params, "layers": {"segments": cut}}


def batch_of(model, rows):
    """Of tokens that the model knows."""
    known = MODELS[model].vocab - 1
    tokens = {"tokens", "targets"}
    found = oracle.batch("gpt2" if model == "odd" else model, rows=rows)
    return {name: np.minimum(x, known) if name in tokens else x for name, x in found.items()}


def gradients(model, plan, devices, rows):
    step = step_of(model, plan, devices)
    chunks = plan.pipeline.chunks_of_stage
    state = step.init_from(
        jax.device_put(in_chunks(start(model), chunks), step.shardings["params"])
    )
    found = jax.jit(step.gradients)(state, step.place(batch_of(model, rows)))
    return jax.tree.map(np.asarray, found.grads), float(found.loss)


@functools.cache
def truth(model, rows):
    return gradients(model, Plan(), oracle.ONE, rows)


def assert_equals_one_device(model, plan, rows=ROWS):
    grads, loss = gradients(model, plan, devices_of(plan), rows)
    want, right = truth(model, rows)
    assert_trees_close(grads, in_chunks(want, plan.pipeline.chunks_of_stage))
    assert_losses_close(loss, right)


def piped(count, **more):
    return {"pipeline": PipelineConfig(microbatches=count, **more)}


def once(count, **more):
    """Weights gathered and gradients reduced once a step."""
    return {"batch": BatchConfig(reduce_once=True), **piped(count, gather="step", **more)}


def preset_once(name, mesh, count):
    return preset(name, mesh=mesh).replace(**once(count))


QUICK = {
    "1f1b": (
        "llama",
        preset("zero3+megatron", mesh={"stage": 2, "fsdp": 2, "tensor": 2}, **piped(4)),
    ),
    "around a ring": (
        "packed",
        preset("zero3+ring+pipeline", mesh={"stage": 2, "ring": 2, "fsdp": 2}, **piped(3)),
    ),
    "interleaved, gathered once": (
        "gpt2",
        Plan(mesh={"stage": 2, "fsdp": 2}, segments=FULL, **piped(3, chunks=2, gather="step")),
    ),
    "2d": (
        "llama",
        Plan(mesh={"stage": 2, "row": 2, "col": 2}, tensor_layout="2d", segments=FULL, **piped(2)),
    ),
    "gathered and reduced once": (
        "packed",
        preset_once("zero3+ring+pipeline", {"stage": 2, "ring": 2, "fsdp": 2}, 3),
    ),
    "a vocabulary of 61": ("odd", Plan(mesh={"stage": 4, "fsdp": 2}, segments=FULL, **piped(3))),
}


@pytest.mark.catches("reduce-once-of-one-device")
@pytest.mark.catches("stage-empty-cells-count")
@pytest.mark.catches("stage-input-of-another")
@pytest.mark.parametrize(("model", "plan"), QUICK.values(), ids=QUICK)
def test_a_case_of_each_kind_equals_one_device(model, plan):
    assert_equals_one_device(model, plan, rows=12)


def meshes():
    """Every factorisation of eight devices with several stages."""
    for mesh in factorisations(8, ("stage", "data", "fsdp", "ring", "ulysses", "tensor")):
        if mesh["stage"] > 1:
            yield {axis: size for axis, size in mesh.items() if size > 1}
    yield {"stage": 2, "row": 2, "col": 2}


PRESETS = ("zero3+megatron", "zero3+megatron_sp", "zero2+megatron", "ddp+megatron_sp")


def mesh_cases():
    for at, mesh in enumerate(meshes()):
        layout = {"tensor_layout": "2d"} if "row" in mesh else {}
        plan = preset(PRESETS[at % 4], mesh=mesh, segments=FULL, **layout, **piped(4))
        yield pytest.param(plan, id=oracle.label(mesh))


@pytest.mark.sweep
@pytest.mark.parametrize("plan", list(mesh_cases()))
def test_every_mesh_with_stages_equals_one_device(plan):
    assert_equals_one_device("llama", plan)


MIXED = (
    {"stage": 2, "fsdp": 2, "tensor": 2},
    {"stage": 4, "ring": 2},
    {"stage": 2, "ulysses": 2, "fsdp": 2},
    {"stage": 2, "data": 2, "ring": 2},
)
SCHEDULES = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "two chunks": {"chunks": 2},
    "zb_h1": {"schedule": "zb_h1"},
    "zb_v": {"schedule": "zb_v"},
}


@pytest.mark.sweep
@pytest.mark.parametrize("mesh", MIXED, ids=oracle.label)
@pytest.mark.parametrize("how", SCHEDULES.values(), ids=SCHEDULES)
def test_every_schedule_equals_one_device(how, mesh):
    plan = preset("zero3+megatron_sp", mesh=mesh, **piped(4, **how))
    assert_equals_one_device("llama", plan)


@pytest.mark.sweep
@pytest.mark.parametrize("mesh", MIXED[:3], ids=oracle.label)
@pytest.mark.parametrize("model", ["gpt2", "bloom", "packed", "mistral"])
def test_every_model_equals_one_device(model, mesh):
    assert_equals_one_device(model, preset("zero3", mesh=mesh, segments=FULL, **piped(2)))


FORMS = {
    "fewer microbatches than stages": (Plan(mesh={"stage": 4}, **piped(2)), 8),
    "one microbatch": (Plan(mesh={"stage": 4, "fsdp": 2}, **piped(1)), 8),
    "rows that nothing divides": (Plan(mesh={"stage": 2, "fsdp": 2}, **piped(3)), 10),
    "no multiple of stages in chunks": (Plan(mesh={"stage": 4}, **piped(6, chunks=2)), 12),
    "fewer than stages in chunks": (Plan(mesh={"stage": 4}, **piped(3, chunks=2)), 12),
    "a chunk a layer": (Plan(mesh={"stage": 2}, segments=FULL, **piped(4, chunks=4)), 8),
    "as batch.microbatch says": (
        Plan(mesh={"stage": 2, "fsdp": 2}, batch=BatchConfig(microbatch=2)),
        16,
    ),
    "microsteps": (Plan(mesh={"stage": 2}, batch=BatchConfig(accumulation=2), **piped(3)), 12),
    "as many as there are": (Plan(mesh={"stage": 2, "fsdp": 2}), 12),
    "gathered once": (
        preset(
            "zero3+ring+pipeline",
            mesh={"stage": 2, "ring": 2, "fsdp": 2},
            segments=FULL,
            **piped(3, gather="step", chunks=2),
        ),
        12,
    ),
    "remat dots": (Plan(mesh={"stage": 2}, segments=(Segment(remat="dots"),), **piped(4)), 8),
    "remat names": (
        Plan(mesh={"stage": 2, "tensor": 2}, segments=(Segment(remat="qkv+mlp"),), **piped(4)),
        8,
    ),
    "keys gathered": (
        preset(
            "zero3+ring",
            mesh={"stage": 2, "ring": 2},
            attention=AttentionConfig(scheme="all_gather"),
            **piped(2),
        ),
        8,
    ),
    "double ring": (preset("ring", mesh={"stage": 2, "ring_out": 2, "ring_in": 2}, **piped(2)), 8),
    "overlap": (
        preset("megatron_sp", mesh={"stage": 2, "tensor": 2}, tensor_matmul="overlap", **piped(2)),
        8,
    ),
    "chunks of the vocabulary": (
        Plan(mesh={"stage": 2, "tensor": 2}, loss=LossConfig(vocab_chunks=3), **piped(2)),
        8,
    ),
    "2.5d": (
        Plan(mesh={"stage": 2, "depth": 2, "row": 1, "col": 2}, tensor_layout="2.5d", **piped(2)),
        8,
    ),
    "3d": (
        Plan(mesh={"stage": 2, "row": 2, "col": 2}, tensor_layout="3d", segments=FULL, **piped(2)),
        8,
    ),
    "cannon": (
        Plan(
            mesh={"stage": 2, "row": 2, "col": 2},
            tensor_layout="2d",
            tensor_matmul="cannon",
            **piped(2),
        ),
        8,
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize(("plan", "rows"), FORMS.values(), ids=FORMS)
def test_every_form_equals_one_device(plan, rows):
    assert_equals_one_device("llama", plan, rows=rows)


ONCE = {
    "every layer again": (
        "llama",
        Plan(mesh={"stage": 2, "fsdp": 2}, segments=FULL, **once(4)),
        12,
    ),
    "tied, in chunks": (
        "gpt2",
        Plan(mesh={"stage": 2, "data": 2, "fsdp": 2}, segments=FULL, **once(3, chunks=2)),
        12,
    ),
    "tensor": (
        "llama",
        preset_once("zero3+megatron_sp", {"stage": 2, "fsdp": 2, "tensor": 2}, 2),
        12,
    ),
    "ulysses": (
        "llama",
        preset_once("zero3+ulysses", {"stage": 2, "ulysses": 2, "fsdp": 2}, 2),
        12,
    ),
    "rows that nothing divides": ("llama", Plan(mesh={"stage": 2, "fsdp": 2}, **once(3)), 10),
    "weights that are whole": (
        "llama",
        preset("zero1", mesh={"stage": 2, "fsdp": 2}, **piped(4)),
        8,
    ),
    "2d": (
        "llama",
        Plan(mesh={"stage": 2, "data": 2, "row": 1, "col": 2}, tensor_layout="2d", **once(2)),
        8,
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize(("model", "plan", "rows"), ONCE.values(), ids=ONCE)
def test_gradients_reduced_once_equal_one_device(model, plan, rows):
    assert_equals_one_device(model, plan, rows=rows)


@pytest.mark.catches("head-on-every-stage")
def test_stages_share_the_tokens_of_a_head_whose_vocabulary_they_cannot_share():
    plan = Plan(mesh={"stage": 4}, **piped(2))
    step = step_of("odd", plan, devices_of(plan))
    program = jax.jit(step.gradients).lower(step.abstract, step.place(batch_of("odd", 4)))
    # Logits of two rows of 32 tokens are nowhere made whole.
    assert "64,61]" not in program.compile().as_text()


def assert_goes_on_as_one_device(plan, folder):
    """Three steps and an evaluation, from a state of one device; which takes it back."""
    given = [oracle.batch("llama", rows=8) for _ in range(3)]
    one, several = (
        step_of("llama", each, devices_of(each), adamw(1e-2)) for each in (Plan(), plan)
    )
    alone = one.init(0)
    one.save(folder, alone)
    state = several.restore(folder)
    for batch in given:
        alone, want = one(alone, batch)
        state, metrics = several(state, batch)
        assert_losses_close(metrics["loss"], want["loss"])
        assert_losses_close(metrics["grad_norm"], want["grad_norm"])
    rows = {name: x[:5] for name, x in given[0].items()}
    want, found = one.evaluate(alone, rows), several.evaluate(state, rows)
    assert_losses_close(found["cross_entropy"], want["cross_entropy"])
    several.save(folder, state)
    back = jax.tree.map(np.asarray, one.restore(folder)["params"])
    mine = jax.tree.map(np.asarray, state["params"])
    assert_trees_close(in_chunks(back, plan.pipeline.chunks_of_stage), mine, tolerance=0)


def test_three_steps_evaluation_and_a_state_of_another_mesh(tmp_path):
    plan = Plan(mesh={"stage": 2, "tensor": 2}, segments=FULL, **piped(2, chunks=2))
    assert_goes_on_as_one_device(plan, tmp_path)


class Counting(nnx.Module):
    """A layer whose sums the loss reads."""

    def __init__(self, *, rngs):
        self.w = param(jax.random.normal(rngs.params(), (4, 4)), ("embed", "mlp"))

    def __call__(self, x, side, state):
        x = jnp.tanh(x @ self.w[...])
        return x, state, {"load": jnp.sum(jnp.square(x))}


class Stacked(nnx.Module):
    def __init__(self, rngs):
        self.scale = param(jnp.full(4, 1.5), ("embed",))
        self.layers = LayerStack(lambda rngs: Counting(rngs=rngs), 4, rngs=rngs)


def counted_loss(model, batch):
    out = model.layers(batch["x"] * model.scale[...])
    count = jnp.float32(batch["x"].shape[0])
    terms = {
        "square": (jnp.sum(jnp.square(out.carry)), count, 1.0),
        "balance": (jnp.sum(out.sums["load"] * jnp.arange(1.0, 5.0)), count, 0.1),
    }
    return terms, {"load": (out.sums["load"], count)}


@pytest.mark.catches("stage-sums-of-another")
@pytest.mark.parametrize("chunks", [1, 2])
def test_what_layers_count_is_in_the_loss_and_its_gradients(chunks):
    x = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    plan = Plan(mesh={"stage": 2, "data": 2}, **piped(4, chunks=chunks))
    found = []
    for each in (Plan(), plan):
        step = build_step(
            Stacked,
            optax.sgd(1.0),
            counted_loss,
            each,
            devices=devices_of(each),
            batch_dims={"x": ("batch", "embed")},
        )
        state = step.init(0)
        got = jax.jit(step.gradients)(state, step.place({"x": x}))
        found.append(jax.tree.map(np.asarray, (got.grads, got.loss, got.sums)))
    (grads, loss, sums), (piped_grads, piped_loss, piped_sums) = found
    assert_trees_close(piped_grads, in_chunks(grads, chunks))
    assert_losses_close(piped_loss, loss)
    np.testing.assert_allclose(piped_sums["load"][0], sums["load"][0], rtol=1e-5)


@pytest.mark.catches("stage-one-number-added-up")
def test_a_loss_of_one_number_is_not_added_up_over_microbatches():
    plan = Plan(mesh={"stage": 2}, **piped(2))
    step = build_step(
        Stacked,
        optax.sgd(1.0),
        lambda model, batch: jnp.mean(model.layers(batch["x"] * model.scale[...]).carry),
        plan,
        devices=devices_of(plan),
        batch_dims={"x": ("batch", "embed")},
    )
    with pytest.raises(InputError, match="it is one number, and of 2 microbatches"):
        step.evaluate(step.init(0), {"x": np.ones((4, 4), np.float32)})


def test_the_program_does_not_grow_with_the_microbatches():
    sizes = []
    for count in (8, 16):
        plan = Plan(mesh={"stage": 2}, segments=FULL, **piped(count, chunks=2))
        step = step_of("llama", plan, devices_of(plan))
        batch = step.abstract_batch(
            {
                name: jax.ShapeDtypeStruct(x.shape, x.dtype)
                for name, x in oracle.batch("llama", rows=count).items()
            }
        )
        compiled = step.lower(step.abstract, batch).compile()
        sizes.append((compiled.memory_analysis().temp_size_in_bytes, len(compiled.as_text())))
    (temp, text), (more, longer) = sizes
    assert more <= 1.02 * temp + 2 * 16 * 32 * 4 * 8  # arrays of the batch itself
    assert longer <= 1.02 * text


REFUSED = {
    "layers": (
        Plan(mesh={"stage": 3}),
        "3 stages cannot share 8 layers evenly; give plan.pipeline.cuts auto",
    ),
    "chunks": (Plan(mesh={"stage": 2}, **piped(2, chunks=3)), "3 chunks cannot share 8 layers"),
    "no chunks": (Plan(mesh={"stage": 2}, **piped(2, schedule="interleaved")), "interleaved"),
    "chunks of 1f1b": (Plan(mesh={"stage": 2}, **piped(2, schedule="1f1b", chunks=2)), "chunks"),
    "policies": (
        Plan(mesh={"stage": 2}, segments=(Segment(count=4), *FULL), **piped(2)),
        "has runs of \\(4, 4\\) layers, and stages that share one program want one for each",
    ),
    "reduced once": (
        Plan(mesh={"stage": 2, "fsdp": 2}, batch=BatchConfig(reduce_once=True), **piped(2)),
        "is split over 'fsdp', which splits the batch; .* give plan.pipeline.gather step",
    ),
}


@pytest.mark.parametrize(("plan", "message"), REFUSED.values(), ids=REFUSED)
def test_what_stages_cannot_do_is_refused(plan, message):
    with pytest.raises(PlanError, match=message):
        step = step_of("llama", plan, devices_of(plan))
        jax.eval_shape(step.gradients, step.abstract, oracle.batch("llama", rows=4))


def test_a_batch_without_weights_is_not_filled_up():
    plan = Plan(mesh={"stage": 2}, **piped(3))
    step = step_of("llama", plan, devices_of(plan))
    batch = {k: v for k, v in oracle.batch("llama", rows=4).items() if k != "weights"}
    with pytest.raises(PlanError, match="4 rows cannot be cut into 3 microbatches"):
        step.place(batch)


def test_cases_are_as_many_as_is_said():
    cases = (list(mesh_cases()), SCHEDULES, FORMS, ONCE)
    assert len(cases[0]) + len(MIXED) * len(SCHEDULES) + 12 + len(FORMS) + len(ONCE) == 80
    assert len(list(itertools.chain(meshes()))) == 22
