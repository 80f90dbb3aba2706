"""Every kind of model on one GPU, on a node, and on up to 1,024 of one or two kinds."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import colossax
from colossax.aot import parse_target
from colossax.config import MeshAxis
from colossax.planner.counting.compiled import usable_bytes
from colossax.planner.profiling import profile_task
from colossax.planner.searching import Subject, plan_run, predict
from colossax.recipes import recipe
from colossax.tasks import task_of

ROWS = 2048
SIZES = ("1x1", "1x8", "8x8", "64x8", "128x8")
MODELS = {
    "dense": ("llama3_8b", "fsdp"),
    "experts": ("mixtral_8x7b", "fsdp"),
    "encoder-decoder": ("t5_stdlib", "data"),
    "ViT": ("vit_digits", "data"),
}
"""Recipes, and the axis over which people would have all devices."""

CASES = [
    pytest.param(*case, marks=pytest.mark.slow if case == ("dense", "128x8") else pytest.mark.sweep)
    for case in ((name, size) for name in MODELS for size in SIZES)
    if case != ("dense", "1x1") and case != ("experts", "1x1") and case != ("experts", "1x8")
]
"""All but models whose states no GPU of that many can hold."""


def holds(answer, target, rows):
    """The plans are of all devices, of the whole batch, and take what a step may at most."""
    for one in answer.plans:
        sizes = one.plan.mesh_sizes(target.size)
        assert math.prod(sizes.values()) == target.size
        said = one.candidate.predicted
        assert said.bytes.total <= usable_bytes(target)
        ways = sizes[MeshAxis.DATA] * sizes[MeshAxis.FSDP] * sizes[MeshAxis.EXPERT]
        assert one.plan.batch.microbatch * ways * said.microbatches == rows
    seconds = [one.seconds.total for one in answer.plans]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize(("name", "size"), CASES)
def test_a_plan_is_found_and_no_slower_than_what_people_would_try_first(name, size):
    (known, axis), target = MODELS[name], parse_target(f"h100:{size}")
    config = recipe(known)
    data = dataclasses.replace(config.data, global_batch=ROWS)
    config = config.replace(data=data)
    answer = plan_run(Subject.of(config), config.plan, target, verify=False)
    assert answer.plans
    holds(answer, target, ROWS)
    profile = profile_task(task_of(config), config.plan, target)
    best = answer.plans[0].plan
    batch = dataclasses.replace(best.batch, microbatch=max(1, ROWS // target.size // 8))
    plain = colossax.preset("zero3", mesh={axis: -1}, precision=best.precision, batch=batch)
    other = predict(profile, plain, target)
    if other.bytes.total <= usable_bytes(target):
        assert answer.plans[0].seconds.total <= other.seconds.total


class Mixer(nnx.Module):
    """Plain Flax, its layers in lists."""

    def __init__(self, rngs: nnx.Rngs):
        self.words = nnx.Embed(1024, 256, rngs=rngs)
        self.ups = nnx.List([nnx.Linear(256, 1024, rngs=rngs) for _ in range(3)])
        self.downs = nnx.List([nnx.Linear(1024, 256, rngs=rngs) for _ in range(3)])

    def __call__(self, words):
        x = self.words(words)
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(nnx.gelu(up(x)))
        return self.words.attend(x)


def loss(model, batch):
    each = optax.softmax_cross_entropy_with_integer_labels(model(batch["words"]), batch["next"])
    return {"words": (jnp.sum(each), jnp.float32(each.size), 1.0)}, {}


@pytest.mark.parametrize(
    "size", [pytest.param(one, marks=[pytest.mark.sweep] * (one != "128x8")) for one in SIZES]
)
def test_a_plain_model_has_plans_of_every_size(size):
    words = jax.ShapeDtypeStruct((ROWS, 128), jnp.int32)
    batch, target = {"words": words, "next": words}, parse_target(f"h100:{size}")
    answer = colossax.plan(Mixer, loss, optax.adamw(1e-3), batch, target, verify=False)
    holds(answer, target, ROWS)


@pytest.mark.sweep
@pytest.mark.parametrize("kinds", ["h100:1x8+a100:1x8", "h100:2x8+a100_80:2x8"])
def test_two_kinds_of_nodes(kinds):
    config, target = recipe("llama3_8b"), parse_target(kinds)
    answer = plan_run(Subject.of(config), config.plan, target, verify=False)
    assert answer.plans
    for one in answer.plans:
        assert one.total_bytes <= max(map(usable_bytes, target.apart))
        assert one.plan.mesh_sizes(target.size)[MeshAxis.STAGE] > 1
