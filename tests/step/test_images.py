"""Models of images train on every mesh as on one device."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from colossax import Plan, boost
from colossax.errors import PlanError
from colossax.models import DINOv2Config, ViTConfig, maker
from colossax.nn import HeadConfig
from colossax.optim import adamw
from colossax.tasks import classification_loss, value_loss
from tests.cases import quick_first
from tests.oracle import assert_losses_close
from tests.step.test_decoder_parts import PLANS, mesh

ROWS = 8
SQUARE = ViTConfig(
    height=6,
    width=10,
    channels=2,
    patch_height=2,
    patch_width=2,
    embed=32,
    layers=4,
    heads=4,
    mlp=64,
    init_std=0.2,
    head=HeadConfig(outputs=3, pool="first"),
)
"""15 patches and the class token: 16 tokens, which devices share."""

MODELS = {
    "classes": (classification_loss(), SQUARE),
    "mean": (
        classification_loss(),
        dataclasses.replace(SQUARE, qkv_bias=False, head=HeadConfig(outputs=3, pool="mean")),
    ),
    "dinov2": (
        classification_loss(),
        DINOv2Config(
            **{**vars(SQUARE), "head": HeadConfig(outputs=3, pool="first_mean")}, layer_scale=0.7
        ),
    ),
    "values": (value_loss(), dataclasses.replace(SQUARE, head=HeadConfig(outputs=1, pool="first"))),
}


def given(model):
    draw = np.random.default_rng(0)
    rows = {"pixels": draw.standard_normal((ROWS, 6, 10, 2)).astype(np.float32)}
    if model == "values":
        return {**rows, "values": draw.standard_normal(ROWS).astype(np.float32)}
    return {**rows, "labels": draw.integers(-1, 3, ROWS).astype(np.int32)}


def run(plan, model, devices=None):
    """Losses and gradient norms of three steps."""
    loss, config = MODELS[model]
    state, step = boost(
        maker(config), adamw(3e-3, eps=1e-3), loss, plan, devices=jax.devices()[:devices]
    )
    found = []
    for _ in range(3):
        state, metrics = step(state, given(model))
        found.append([float(metrics[name]) for name in ("loss", "grad_norm")])
    return np.asarray(found)


@functools.cache
def truth(model):
    return run(Plan(mesh={"data": 1}), model, 1)


ALL = {"data": mesh(data=8), **PLANS}
CASES = [
    *((name, "classes") for name in ALL),
    *((name, "mean") for name in ("data, ring, tensor", "ring, ulysses", "cut stages")),
    *((name, "dinov2") for name in ALL),
    ("stages, ring", "values"),
]
QUICK = [("stages, ring", "classes"), ("ulysses", "classes"), ("data, ring, tensor", "dinov2")]


@pytest.mark.parametrize(("name", "model"), quick_first(CASES, QUICK))
def test_every_plan_trains_as_one_device(name, model):
    assert_losses_close(run(ALL[name], model), truth(model))


@pytest.mark.parametrize("model", quick_first(MODELS, ["classes"]))
def test_each_learns(model):
    losses = truth(model)[:, 0]
    assert losses[2] < losses[0]


def test_a_sequence_that_devices_do_not_divide_is_refused():
    config = dataclasses.replace(SQUARE, height=4)
    state, step = boost(maker(config), adamw(1e-3), classification_loss(), mesh(ring=2, data=4))
    batch = {"pixels": np.zeros((8, 4, 10, 2), np.float32), "labels": np.zeros(8, np.int32)}
    message = "dim 'seq' has size 11, which mesh axis 'ring' of 2 devices does not divide"
    with pytest.raises(PlanError, match=message):
        step(state, batch)
