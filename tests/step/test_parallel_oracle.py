"""Sharded equals one device, on every axis at once: loss and gradients of five models.

Every factorisation of eight devices over data, fsdp, ring, ulysses and tensor, and over data, fsdp,
depth, row and col in the tensor layouts they make. The default run takes a case of each kind of
combination, `-m sweep` all others.
"""

import dataclasses
import functools
import itertools
import math
import zlib

import jax
import numpy as np
import optax
import pytest

from colossax.config import BatchConfig, Plan, Segment, preset
from colossax.models import BloomConfig, GPT2Config, LlamaConfig, MistralConfig, maker
from colossax.planner import build_step
from colossax.tasks import next_token_loss
from tests.oracle import assert_losses_close, assert_trees_close, factorisations
from tests.step.test_step import text_batch

SIZES = {"vocab": 64, "embed": 32, "layers": 2, "heads": 8, "max_seq": 32}
MODELS = {
    "llama": LlamaConfig(**SIZES, kv_heads=4, mlp=48),
    "gpt2": GPT2Config(**SIZES, mlp=64),
    "bloom": BloomConfig(**SIZES),
    "mistral": MistralConfig(**SIZES, kv_heads=2, mlp=48, window=7),
    "packed": LlamaConfig(**SIZES, kv_heads=4, mlp=48),
}
ROWS, SEQ = 8, 32
ONE = jax.devices()[:1]


def batch(model, *, rows=ROWS, seq=SEQ):
    """Packed documents, or whole rows, which have neither segments nor positions."""
    found = text_batch(rows=rows, seq=seq, seed=3)
    kept = found if model == "packed" else ("tokens", "targets", "weights")
    return {name: found[name] for name in kept}


@functools.cache
def start(model):
    """Parameters whose norms and biases are not one and zero."""
    step = build_step(maker(MODELS[model]), optax.sgd(1.0), next_token_loss(), Plan(), devices=ONE)

    def stir(leaf, info):
        noise = np.random.default_rng(zlib.crc32(info.path.encode())).normal(size=leaf.shape)
        return np.asarray(leaf) + (noise * 0.1).astype(np.float32)

    return jax.tree.map(stir, step.init()["params"], step.spec.infos)


def loss_and_gradients(model, plan, devices, *, given=None, loss=None):
    step = build_step(
        maker(MODELS[model]),
        optax.sgd(1.0),
        loss or next_token_loss(z_loss=1e-3),
        plan,
        devices=devices,
    )
    state = step.init_from(jax.device_put(start(model), step.shardings["params"]))
    placed = step.place(batch(model) if given is None else given)
    found = jax.jit(step.gradients)(state, placed)
    return jax.tree.map(np.asarray, found.grads), float(found.loss)


@functools.cache
def truth(model, seq=SEQ, rows=ROWS):
    given = batch(model, seq=seq, rows=rows)
    return loss_and_gradients(model, Plan(), ONE, given=given)


def assert_equals_one_device(model, plan, devices, **how):
    given = how.get("given")
    rows, seq = (ROWS, SEQ) if given is None else given["tokens"].shape
    grads, loss = loss_and_gradients(model, plan, devices, **how)
    want, right = truth(model, seq, rows)
    assert_trees_close(grads, want)
    assert_losses_close(loss, right)


SEQUENCE_MESHES = factorisations(8, ("data", "fsdp", "ring", "ulysses", "tensor"))
LAYOUT_MESHES = [
    mesh
    for mesh in factorisations(8, ("data", "fsdp", "depth", "row", "col"))
    if mesh["depth"] * mesh["row"] * mesh["col"] > 1
]

QUICK_SEQUENCES = {
    ("gpt2", "ulysses8"),
    ("bloom", "ring4-ulysses2"),
    ("mistral", "ring4-tensor2"),
    ("packed", "ring2-ulysses2-tensor2"),
    ("llama", "data2-ring4"),
}
QUICK_LAYOUTS = {
    ("llama", "2d", "row2-col4"),
    ("packed", "2.5d", "depth2-row2-col2"),
    ("gpt2", "3d", "depth2-row2-col2"),
    ("mistral", "2.5d", "fsdp2-depth2-col2"),
}
PRESETS = ("zero3+megatron", "zero3+megatron_sp", "zero2+megatron", "ddp+megatron_sp")


def label(mesh):
    return "-".join(f"{axis}{size}" for axis, size in mesh.items() if size > 1)


def layouts_of(mesh):
    """The tensor layouts that a mesh of these axes may have."""
    return ("2.5d", "3d") if mesh["depth"] > 1 else ("2d", "3d")


def sequence_cases():
    for (at, mesh), model in itertools.product(enumerate(SEQUENCE_MESHES), MODELS):
        plan = preset(PRESETS[at % len(PRESETS)], mesh=mesh)
        marks = [] if (model, label(mesh)) in QUICK_SEQUENCES else [pytest.mark.sweep]
        yield pytest.param(model, plan, id=f"{model}-{label(mesh)}", marks=marks)


def layout_cases():
    for mesh, model in itertools.product(LAYOUT_MESHES, MODELS):
        for layout in layouts_of(mesh):
            plan = Plan(mesh=mesh, tensor_layout=layout)
            marks = [] if (model, layout, label(mesh)) in QUICK_LAYOUTS else [pytest.mark.sweep]
            yield pytest.param(model, plan, id=f"{model}-{layout}-{label(mesh)}", marks=marks)


@pytest.mark.parametrize(("model", "plan"), list(sequence_cases()))
def test_every_sequence_mesh_equals_one_device(devices, model, plan, capfd):
    assert_equals_one_device(model, plan, devices)
    assert "rematerialization" not in capfd.readouterr().err


@pytest.mark.sentinel("mistral-2.5d-fsdp2-depth2-col2")
@pytest.mark.parametrize(("model", "plan"), list(layout_cases()))
def test_every_tensor_layout_equals_one_device(devices, model, plan, capfd):
    assert_equals_one_device(model, plan, devices)
    assert "rematerialization" not in capfd.readouterr().err


def test_the_quick_cases_exist():
    sequences = {(model, label(mesh)) for model in MODELS for mesh in SEQUENCE_MESHES}
    layouts = {
        (model, layout, label(mesh))
        for model in MODELS
        for mesh in LAYOUT_MESHES
        for layout in layouts_of(mesh)
    }
    assert sequences >= QUICK_SEQUENCES
    assert layouts >= QUICK_LAYOUTS
    assert len(SEQUENCE_MESHES) == 35


@pytest.mark.parametrize("scheme", ["ring", "all_gather", "self_attention", "zigzag"])
def test_every_scheme_equals_one_device(devices, scheme):
    plan = preset("zero3", mesh={"ring": 4, "tensor": 2})
    plan = plan.replace(attention=dataclasses.replace(plan.attention, scheme=scheme))
    assert_equals_one_device("packed", plan, devices)


@pytest.mark.parametrize("mesh", [{"ring_out": 2, "ring_in": 4}, {"ring_out": 4, "ring_in": 2}])
def test_a_double_ring_equals_one_device(devices, mesh):
    assert_equals_one_device("llama", preset("zero3", mesh=mesh), devices)


@pytest.mark.parametrize("seq", [29, 19])
@pytest.mark.parametrize("mesh", [{"ring": 4, "ulysses": 2}, {"fsdp": 2, "ulysses": 4}])
def test_rows_that_nothing_divides_are_filled_up(devices, mesh, seq):
    given = batch("packed" if seq == 29 else "llama", seq=seq)
    model = "packed" if seq == 29 else "llama"
    assert_equals_one_device(model, preset("zero3", mesh=mesh), devices, given=given)


def test_microbatches_remat_and_chunks_on_a_split_sequence(devices):
    plan = preset(
        "zero3+megatron_sp",
        mesh={"fsdp": 2, "ring": 2, "tensor": 2},
        batch=BatchConfig(accumulation=2),
        segments=(Segment(remat="full"),),
    )
    plan = plan.replace(loss=dataclasses.replace(plan.loss, vocab_chunks=3))
    assert_equals_one_device("packed", plan, devices)


def test_gradients_reduced_once_around_a_ring(devices):
    plan = preset("zero1", mesh={"fsdp": 2, "ring": 4}, batch=BatchConfig(accumulation=2))
    assert_equals_one_device("llama", plan, devices)


def shifted_loss(model, batch):
    """A loss that compares neighbours, and so must see rows in their natural order."""
    hidden, _ = model.hidden(batch["tokens"])
    logits = model.logits(hidden)[:, :-1]
    picked = jax.nn.log_softmax(logits)
    labels = batch["tokens"][:, 1:, None]
    total = -jax.numpy.take_along_axis(picked, labels, axis=-1).sum()
    return {"shifted": (total, float(math.prod(labels.shape)), 1.0)}, {}


def test_a_loss_of_ones_own_sees_natural_order(devices):
    grads, loss = loss_and_gradients(
        "llama", preset("zero3", mesh={"ring": 4, "ulysses": 2}), devices, loss=shifted_loss
    )
    want, right = loss_and_gradients("llama", Plan(), ONE, loss=shifted_loss)
    assert_trees_close(grads, want)
    assert_losses_close(loss, right)


@pytest.mark.parametrize("seq", [32, 29])
def test_device_arrays_are_arranged_inside_the_step(devices, seq):
    plan = preset("zero3", mesh={"ring": 8})
    given = jax.tree.map(jax.numpy.asarray, batch("packed", seq=seq))
    assert_equals_one_device("packed", plan, devices, given=given)
