"""Two encoders, of texts and of images, train on every mesh as on one device."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from colossax import Plan
from colossax.config import PipelineConfig
from colossax.models import CLIPConfig, SigLIPConfig, maker
from colossax.nn import EncoderPart
from colossax.optim import adamw
from colossax.planner import build_step
from colossax.tasks import image_text_loss
from tests.cases import quick_first
from tests.oracle import assert_losses_close
from tests.step.test_decoder_parts import PLANS, mesh

ROWS, LENGTH, VOCAB, END = 8, 16, 64, 50
PART = {"layers": 2, "heads": 4, "mlp": 64, "norm_eps": 1e-5}
SIZES = {
    "vocab": VOCAB,
    "max_seq": LENGTH,
    **dict.fromkeys(("height", "width"), 8),
    **dict.fromkeys(("patch_height", "patch_width"), 2),
    "channels": 2,
    "init_std": 0.2,
}
"""16 patches, which devices share, and of CLIP a class token: 17, which they cannot."""

MODELS = {
    "siglip": (
        "sigmoid",
        SigLIPConfig(
            text=EncoderPart(embed=48, activation="gelu_tanh", **PART),
            image=EncoderPart(embed=32, activation="gelu_tanh", **PART),
            log_scale=1.0,
            shift=-1.0,
            **SIZES,
        ),
    ),
    "clip": (
        "softmax",
        CLIPConfig(
            text=EncoderPart(embed=48, activation="quick_gelu", **PART),
            image=EncoderPart(embed=32, activation="quick_gelu", **PART),
            projection=24,
            log_scale=1.0,
            eos=END,
            **SIZES,
        ),
    ),
}


def given(seed=0):
    """Images, and texts that end at different places, the rest of their rows being others."""
    draw = np.random.default_rng(seed)
    tokens = draw.integers(0, END, (ROWS, LENGTH)).astype(np.int32)
    tokens[np.arange(ROWS), 3 + np.arange(ROWS)] = END
    return {
        "pixels": draw.standard_normal((ROWS, 8, 8, 2)).astype(np.float32),
        "tokens": tokens,
    }


def built(plan, model, devices=None, **options):
    form, config = MODELS[model]
    loss = image_text_loss(form=form)
    devices = jax.devices()[:devices]
    return build_step(maker(config), adamw(3e-3, eps=1e-3), loss, plan, devices=devices, **options)


def run(plan, model, devices=None):
    """Losses, gradient norms and right guesses of three steps."""
    step = built(plan, model, devices)
    state, found = step.init(0), []
    for _ in range(3):
        state, metrics = step(state, given())
        found.append([float(metrics[name]) for name in ("loss", "grad_norm", "accuracy")])
    return np.asarray(found)


@functools.cache
def truth(model):
    return run(Plan(mesh={"data": 1}), model, 1)


ONE = PipelineConfig(microbatches=1)


def whole(plan):
    """The plan with one microbatch, for every stage has the whole batch then."""
    if plan.mesh.get("stage", 1) == 1:
        return plan
    return plan.replace(pipeline=dataclasses.replace(plan.pipeline, microbatches=1))


ALL = {"data": mesh(data=8), **PLANS}
ALL = {name: whole(plan) for name, plan in ALL.items() if plan.batch.accumulation == 1}
SHARED = [name for name, plan in ALL.items() if {"ring", "ulysses"} & plan.mesh.keys()]
"""Those whose devices share a row, which 17 tokens do not allow."""

CASES = [
    *((name, "siglip") for name in ALL),
    *((name, "clip") for name in ALL if name not in SHARED),
]
QUICK = [("data, ring, tensor", "siglip"), ("fsdp, tensor", "clip")]


@pytest.mark.catches("own-texts-alone")
@pytest.mark.parametrize(("name", "model"), quick_first(CASES, QUICK))
def test_every_plan_trains_as_one_device(name, model):
    assert_losses_close(run(ALL[name], model), truth(model))
