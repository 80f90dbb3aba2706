"""Models of sound train on every mesh as on one device."""

import functools

import jax
import numpy as np
import pytest

from colossax import Plan, boost
from colossax.config import BatchConfig, OffloadConfig, PipelineConfig, Segment
from colossax.errors import PlanError
from colossax.models import WhisperConfig, maker
from colossax.optim import adamw
from colossax.tasks import next_token_loss
from tests.cases import quick_first
from tests.oracle import assert_losses_close
from tests.step.test_decoder_parts import PLANS as OF_ONE_STACK
from tests.step.test_decoder_parts import mesh

CONFIG = WhisperConfig(
    vocab=64,
    embed=32,
    layers=3,
    decoder_layers=2,
    heads=4,
    decoder_heads=4,
    mlp=64,
    decoder_mlp=48,
    mels=6,
    max_source=32,
    max_seq=32,
    start=1,
    eos=2,
    init_std=0.1,
)
ROWS, FRAMES, WRITTEN = 8, 48, 16
PLANS = (
    {"data": mesh(data=8), "fsdp": mesh(fsdp=8), "tensor": mesh(data=2, tensor=4)}
    | {name: plan for name, plan in OF_ONE_STACK.items() if "stage" not in name}
    | {
        "ring": mesh(ring=8),
        "cut stages": mesh(stage=2, fsdp=2, tensor=2).replace(pipeline=PipelineConfig(cuts=(2, 3))),
        "accumulation, ring": mesh(data=2, ring=2, tensor=2).replace(
            batch=BatchConfig(accumulation=2), segments=(Segment(remat="full"),)
        ),
        "host memory": mesh(fsdp=4, tensor=2).replace(offload=OffloadConfig(parameters=1.0)),
    }
)
QUICK = ("data, ring, tensor", "fsdp, tensor")


def batch(written=WRITTEN, frames=FRAMES):
    draw = np.random.default_rng(0)
    ids = {
        name: draw.integers(0, 64, (ROWS, written)).astype(np.int32)
        for name in ("tokens", "targets")
    }
    return ids | {
        "frames": draw.standard_normal((ROWS, frames, 6)).astype(np.float32),
        "weights": (draw.random((ROWS, written)) < 0.9).astype(np.float32),
    }


def run(plan, devices=None, given=None):
    """Losses and gradient norms of three steps."""
    state, step = boost(
        maker(CONFIG),
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
def truth():
    return run(Plan(mesh={"data": 1}), 1)


@pytest.mark.parametrize("plan", quick_first(PLANS, QUICK))
def test_training_equals_one_device(plan):
    found = run(PLANS[plan])
    assert_losses_close(found[:, 0], truth()[:, 0])
    np.testing.assert_allclose(found[:, 1], truth()[:, 1], rtol=2e-5)


def test_it_learns():
    losses = truth()[:, 0]
    assert losses[2] < losses[0]


@pytest.mark.catches("sound-in-the-order-of-texts")
@pytest.mark.sweep
def test_texts_that_devices_do_not_divide_are_filled_up():
    given = batch(written=13)
    one = run(Plan(mesh={"data": 1}), 1, given)
    found = run(mesh(data=2, ring=2, ulysses=2), given=given)
    assert_losses_close(found[:, 0], one[:, 0])


def test_sound_that_devices_do_not_divide_is_refused():
    state, step = boost(maker(CONFIG), adamw(1e-3), next_token_loss(), mesh(ring=4, data=2))
    with pytest.raises(PlanError, match="dim 'seq' has size .*, which mesh axis 'ring' of 4"):
        step(state, batch(frames=44))
