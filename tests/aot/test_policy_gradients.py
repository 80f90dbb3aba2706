"""Proximal policy optimisation at full size, compiled for GPUs that are not there."""

import dataclasses

import pytest

from colossax.aot import parse_target
from colossax.config import BatchConfig
from colossax.planner import inspect_run
from colossax.planner.counting.compiled import usable_bytes
from colossax.recipes import recipe

pytestmark = pytest.mark.aot

LARGE = {"8b": recipe("llama3_8b"), "70b": recipe("llama3_70b")}
SMALL = {"layers": 16, "embed": 2048, "heads": 32, "kv_heads": 8, "mlp": 8192}


def ppo(like, gpus, **sizes):
    """A run whose policy and critic learn whole beside a frozen reference, all cut over all GPUs.

    Each GPU has a row of two prompts with their answers at once. What the models are asked before
    is a part of the step.
    """
    config = recipe("ppo")
    batch = BatchConfig(accumulation=2)
    return config.replace(
        model=dataclasses.replace(like.model, **sizes),
        plan=like.plan.replace(mesh={"fsdp": gpus}, batch=batch),
        data=dataclasses.replace(config.data, seq_len=2048, global_batch=2 * gpus),
        policy=dataclasses.replace(config.policy, divergence=0.05),
        objective=dataclasses.replace(config.objective, documents=2),
    )


CASES = {
    "1.5b on one H200": ("8b", SMALL, "h200:1x1", 1, 1.4e9),
    "8b on 8 H100": ("8b", {}, "h100:1x8", 8, 8.0e9),
    "70b on 64 H100": ("70b", {}, "h100:8x8", 64, 70.5e9),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_four_models_fit(case):
    """Policy, critic and reference as compiled; beside them a judge of as many numbers."""
    name, sizes, wanted, gpus, least = CASES[case]
    target = parse_target(wanted)
    found = inspect_run(ppo(LARGE[name], gpus, **sizes), target)
    # The critic has a column in place of the vocabulary's.
    model = dataclasses.replace(LARGE[name].model, **sizes)
    critic = found.parameters - 2 * (one := _numbers(model))
    assert critic == one - model.vocab * model.embed + model.embed
    assert one >= least
    terms, judge = found.memory.terms, 4 * critic / gpus
    assert terms["parameters"] == pytest.approx(4 * (2 * one + critic) / gpus, rel=0.01)
    assert terms["optimizer"] == pytest.approx(8 * (one + critic) / gpus, rel=0.01)
    assert found.fits
    assert found.memory.total_bytes + judge <= usable_bytes(target)


def _numbers(model):
    """Of all parameters of a Llama 3."""
    each = model.embed // model.heads
    attention = 2 * model.embed * (model.heads + model.kv_heads) * each
    layer = attention + 3 * model.embed * model.mlp + 2 * model.embed
    return 2 * model.vocab * model.embed + model.layers * layer + model.embed
