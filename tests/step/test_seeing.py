"""Decoders that read images among their tokens train on every mesh as on one device."""

import functools

import jax
import numpy as np
import pytest

from colossax import Plan, boost
from colossax.config import BatchConfig, OffloadConfig, PipelineConfig, Segment
from colossax.errors import InputError
from colossax.models import LlamaConfig, LlavaConfig, Qwen2Config, Qwen2VLConfig, maker
from colossax.nn import EncoderPart, ProjectorConfig
from colossax.optim import adamw
from colossax.tasks import next_token_loss
from tests.cases import quick_first
from tests.oracle import assert_losses_close
from tests.step.test_decoder_parts import PLANS as OF_ONE_STACK
from tests.step.test_decoder_parts import mesh

CONFIG = LlavaConfig(
    text=LlamaConfig(
        vocab=64, embed=32, layers=2, heads=8, kv_heads=4, mlp=64, max_seq=64, init_std=0.1
    ),
    image=EncoderPart(embed=32, layers=2, heads=4, mlp=48, activation="quick_gelu", norm_eps=1e-5),
    height=6,
    width=6,
    channels=2,
    patch_height=2,
    patch_width=2,
    image_token=63,
    init_std=0.1,
)
"""Nine patches and the class token, ten tokens, which no devices could share."""

SQUARES = Qwen2VLConfig(
    text=Qwen2Config(
        vocab=64, embed=64, layers=2, heads=8, kv_heads=4, mlp=64, max_seq=64, init_std=0.1
    ),
    sections=(1, 1, 2),
    image=EncoderPart(embed=32, layers=2, heads=4, mlp=64, activation="quick_gelu", norm_eps=1e-6),
    projector=ProjectorConfig(merge=2, norm_eps=1e-6, width=128),
    height=6,
    width=6,
    channels=2,
    patch_height=1,
    patch_width=1,
    image_token=63,
    init_std=0.1,
)
"""Nine squares of four patches, and positions of three axes."""

MODELS = {"llava": CONFIG, "qwen2_vl": SQUARES}

ROWS, SEQ, IMAGES, PLACES = 8, 32, 2, 9
PLANS = (
    {"data": mesh(data=8), "fsdp": mesh(fsdp=8), "tensor": mesh(data=2, tensor=4)}
    | {name: plan for name, plan in OF_ONE_STACK.items() if "stage" not in name}
    | {
        "ring": mesh(ring=8),
        "cut stages": mesh(stage=2, fsdp=2, tensor=2).replace(pipeline=PipelineConfig(cuts=(2, 2))),
        "accumulation, ring": mesh(data=2, ring=2, tensor=2).replace(
            batch=BatchConfig(accumulation=2), segments=(Segment(remat="full"),)
        ),
        "host memory": mesh(fsdp=4, tensor=2).replace(offload=OffloadConfig(parameters=1.0)),
    }
)


def batch(rows=ROWS):
    """In each row two images: in front of the text or between, of some rows one alone."""
    draw = np.random.default_rng(0)
    ids = {
        name: draw.integers(0, 63, (rows, SEQ)).astype(np.int32) for name in ("tokens", "targets")
    }
    weights = (draw.random((rows, SEQ)) < 0.9).astype(np.float32)
    for row in range(rows):
        for image, start in enumerate((row % 4, 14 + row % 3)[: 1 + (row % 3 != 0)]):
            places = slice(start, start + PLACES)
            ids["tokens"][row, places] = 64 + PLACES * image + np.arange(PLACES)
            weights[row, places] = 0
    return ids | {
        "pixels": draw.standard_normal((rows, IMAGES, 6, 6, 2)).astype(np.float32),
        "weights": weights,
    }


def run(plan, devices=None, given=None, model="llava"):
    """Losses and gradient norms of three steps."""
    state, step = boost(
        maker(MODELS[model]),
        adamw(3e-3, eps=1e-3),
        next_token_loss(),
        plan,
        devices=jax.devices()[:devices],
    )
    found = []
    for _ in range(3):
        state, metrics = step(state, batch() if given is None else given)
        found.append([float(metrics[name]) for name in ("loss", "grad_norm")])
    return np.asarray(found)


@functools.cache
def truth(model="llava"):
    return run(Plan(mesh={"data": 1}), 1, model=model)


CASES = [(plan, model) for plan in PLANS for model in MODELS]
QUICK = [("data, ring, tensor", "llava"), ("data, ring, tensor", "qwen2_vl")]
QUICK += [("fsdp, tensor", "llava")]


@pytest.mark.catches("images-share-rows")
@pytest.mark.catches("points-in-the-order-of-devices")
@pytest.mark.parametrize(("plan", "model"), quick_first(CASES, QUICK))
def test_training_equals_one_device(plan, model):
    found, one = run(PLANS[plan], model=model), truth(model)
    assert_losses_close(found[:, 0], one[:, 0])
    np.testing.assert_allclose(found[:, 1], one[:, 1], rtol=2e-5)


def test_it_learns():
    losses = truth()[:, 0]
    assert losses[2] < losses[0]


@pytest.mark.catches("places-without-images")
def test_places_that_no_image_has_are_refused():
    given = batch()
    given["tokens"][3, 5] = 64 + IMAGES * PLACES
    with pytest.raises(InputError, match=r"batch 'tokens': 82 at \[3, 5\], and the model knows"):
        run(Plan(mesh={"data": 1}), 1, given)
    given = batch()
    del given["pixels"]
    with pytest.raises(InputError, match="batch 'tokens': 64 at .*and the model knows 0 to 63"):
        run(Plan(mesh={"data": 1}), 1, given)
