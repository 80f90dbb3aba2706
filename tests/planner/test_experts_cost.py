"""What an inspection says of experts, against parameters counted by hand and other layouts."""

import dataclasses
import functools

import jax
import pytest

from colossax.config import ExpertsConfig, Plan
from colossax.planner.counting.experts_cost import experts_cost
from colossax.planner.task_step import task_step
from colossax.recipes import recipe
from colossax.tasks import task_of

EMBED, MLP, EXPERTS, CHOICES, LAYERS = 128, 192, 8, 2, 4
OF_EXPERT = 3 * EMBED * MLP
ROWS, SEQ = 32, 128


@functools.cache
def cost(dispatch="passes", capacity=1.25, placement=None, **mesh):
    config = recipe("moe_tiny")
    experts = ExpertsConfig(dispatch=dispatch, capacity=capacity, placement=placement)
    task = task_of(config.replace(plan=Plan(mesh=mesh, experts=experts)))
    step = task_step(task, Plan(mesh=mesh, experts=experts), jax.devices())
    flops = config.model.decoder().train_flops_per_token(SEQ)
    return step, experts_cost(step, (ROWS, SEQ), 1, flops), flops


@pytest.mark.catches("idle-experts-met")
def test_active_parameters_and_flops_are_those_of_the_chosen():
    step, found, flops = cost(expert=8)
    total = step.spec.parameter_count()
    idle = LAYERS * (EXPERTS - CHOICES) * OF_EXPERT
    assert found.parameters == LAYERS * EXPERTS * OF_EXPERT
    assert found.active_parameters == total - idle
    assert found.flops_per_token_all == flops + 6 * idle
    # Those of a dense model as wide as the chosen, but for the router.
    wide = dataclasses.replace(
        recipe("moe_tiny").model.decoder(), mixture=None, mlp=CHOICES * MLP
    ).train_flops_per_token(SEQ)
    assert flops == wide + 6 * LAYERS * EMBED * EXPERTS


def test_buffers_and_bytes_by_form():
    _, found, _ = cost(expert=8)
    slots = ROWS * SEQ * CHOICES // 8 // 8 * 5 // 4
    row = EMBED * 4
    assert found.buffer_bytes == 8 * slots * row
    rows = 5 * 7 / 8 * 8 * slots * (row + 3 * 4 / 5)
    assert found.sent["passes"].tokens == pytest.approx(LAYERS * rows, rel=2e-3)
    gathered = 5 * 7 / 8 * ROWS * SEQ * (row + CHOICES * 4)
    assert found.sent["gather"].tokens == pytest.approx(LAYERS * gathered, rel=1e-3)
    assert found.sent["weights"].tokens == 0
    # Gathered twice, gradients scattered once.
    weights = 3 * 7 / 8 * LAYERS * EXPERTS * OF_EXPERT * 4
    assert found.sent["weights"].weights == pytest.approx(weights)


def test_a_placement_is_counted_beside_forms_that_have_none():
    """The first expert twice: a device has room for three, and its matrices are sent along."""
    twice = ((0, 1, 0), (2, 3, 4), (4, 5, 6), (6, 7, 2))
    _, found, _ = cost(expert=4, data=2, placement=twice)
    _, plain, _ = cost(expert=4, data=2)
    assert found.sent["passes"].weights > plain.sent["passes"].weights
    assert found.sent["weights"] == plain.sent["weights"]


def test_the_worst_load_and_the_passes_that_it_takes():
    _, found, _ = cost(expert=4, tensor=2)
    assert found.worst_load == 4  # a device's one expert is of all tokens the first choice
    assert found.layout.passes == -(-ROWS * SEQ // 8 // found.layout.slots) == 4
    said = found.to_json()
    assert said["experts"]["passes"] == {"assumed": 1, "worst": 4}
    assert said["experts"]["load"] == {"one_pass": 1.25, "worst": 4}
    assert "assumed_trips" not in said
    assert dataclasses.replace(found, assumed_loops=2).to_json()["assumed_trips"] == 1
    text = "\n".join(dataclasses.replace(found, assumed_loops=2).lines)
    assert "which takes 4 passes" in text and "of unknown length (2 in the program)" in text


def test_a_dense_model_has_none():
    task = task_of(recipe("llama_tiny"))
    step = task_step(task, Plan(mesh={"fsdp": 8}), jax.devices())
    assert experts_cost(step, (24, 96), 1, 1) is None
