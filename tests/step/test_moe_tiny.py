"""The recipe `moe_tiny`, narrower and for three steps: equal losses however it is spread."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from colossax.config import BatchConfig, ExpertsConfig, Plan
from colossax.nn import Decoder
from colossax.optim import adamw
from colossax.planner import boost
from colossax.recipes import recipe
from colossax.tasks import next_token_loss
from tests.oracle import assert_losses_close

pytestmark = pytest.mark.sweep

STEPS, ROWS, LENGTH = 3, 32, 32


def config():
    """As the recipe has it, but for its widths."""
    model = dataclasses.replace(recipe("moe_tiny").model, vocab=64, embed=32, mlp=24)
    return model.decoder()


def losses(plan, devices=None):
    """Loss, gradient norm and loads of each step."""
    made = config()
    state, step = boost(
        lambda rngs: Decoder(made, rngs=rngs),
        adamw(3e-3),
        next_token_loss(),
        plan,
        devices=jax.devices()[:devices],
    )
    found = []
    for at in range(STEPS):
        tokens = np.random.default_rng(at).integers(0, 64, (ROWS, LENGTH + 1)).astype(np.int32)
        batch = {
            "tokens": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "weights": np.ones((ROWS, LENGTH), np.float32),
        }
        state, metrics = step(state, batch)
        names = ("loss", "grad_norm", "expert_load", "dropped_choices")
        found.append({name: np.asarray(metrics[name]) for name in names})
    return found


@functools.cache
def truth():
    return losses(Plan(mesh={"data": 1}), 1)


MESHES = {
    "expert": {"expert": 8},
    "expert, fsdp": {"expert": 2, "fsdp": 4},
    "expert, tensor": {"expert": 4, "tensor": 2},
    "expert, ring": {"expert": 2, "ring": 2, "tensor": 2},
    "expert, ulysses": {"expert": 2, "ulysses": 2, "fsdp": 2},
    "expert, stage": {"expert": 2, "stage": 2, "tensor": 2},
}

FORMS = ("passes", "gather", "weights")

CASES = [
    *((mesh, form, 1) for mesh in MESHES for form in FORMS),
    *((mesh, "passes", 4) for mesh in MESHES),
    ("expert", "gather", 2),
    ("expert, tensor", "weights", 2),
]


@pytest.mark.parametrize(("mesh", "form", "microbatches"), CASES)
def test_losses_are_equal_on_every_mesh_form_and_microbatch_count(mesh, form, microbatches):
    plan = Plan(
        mesh=MESHES[mesh],
        experts=ExpertsConfig(dispatch=form),
        batch=BatchConfig(accumulation=microbatches),
    )
    if "stage" in mesh:
        plan = plan.replace(batch=BatchConfig(accumulation=max(2, microbatches)))
    for one, other in zip(losses(plan), truth(), strict=True):
        for name, value in one.items():
            assert_losses_close(value, other[name], tolerance=2e-5)
        assert not one["dropped_choices"].any()


def test_a_capacity_that_takes_every_load_drops_nothing():
    experts = ExpertsConfig(dispatch="capacity", capacity=8.0)
    for one, other in zip(losses(Plan(mesh={"expert": 8}, experts=experts)), truth(), strict=True):
        assert_losses_close(one["loss"], other["loss"], tolerance=2e-5)
        assert not one["dropped_choices"].any()
