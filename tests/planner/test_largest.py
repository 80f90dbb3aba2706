"""The search for the largest microbatch; what it compiles is replaced by a rule."""

import jax
import pytest

from colossax.aot import parse_target
from colossax.config import BatchConfig, PipelineConfig, Plan
from colossax.pipeline import schedule, simulate
from colossax.planner import largest_microbatch
from colossax.planner.deciding import largest
from colossax.recipes import recipe
from colossax.step.microbatches import num_microbatches
from colossax.tasks import task_of

TARGET = parse_target("h100:1x8")
DIMS = dict.fromkeys(("tokens", "targets", "weights", "segments", "positions"), ("batch", "seq"))


def compiled_for(plan, monkeypatch):
    """Microbatches of each size that is tried, of which three rows fit."""
    tried = {}

    def needed(task, plan, target):
        count = num_microbatches(plan.bind(), dict(task.shapes), DIMS)
        tried[plan.batch.microbatch] = count
        return (plan.batch.microbatch > 3) * 2**60

    monkeypatch.setattr(largest, "target_devices", lambda target: jax.devices())
    monkeypatch.setattr(largest, "_needed_bytes", needed)
    assert largest_microbatch(task_of(recipe("llama_tiny")), plan, TARGET) == 3
    assert set(tried) == {1, 2, 3, 4}
    assert len(set(tried.values())) == 1
    return tried[3]


@pytest.mark.slow
@pytest.mark.catches("largest-fills-the-pipeline")
@pytest.mark.parametrize(
    ("name", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zb_h1", 1), ("zb_v", 2)]
)
@pytest.mark.parametrize("form", ["lockstep", "free"])
def test_stages_are_as_full_as_they_get(name, chunks, form, monkeypatch):
    pipeline = PipelineConfig(schedule=name, chunks=chunks)
    plan = Plan(mesh={"stage": 4, "fsdp": 2}, pipeline=pipeline)
    count = compiled_for(plan, monkeypatch)
    few, many = (simulate(schedule(name, 4, n, chunks, form)) for n in (count, 8 * count))
    assert (few.saved, few.pending) == (many.saved, many.pending)
    assert form == "free" or few.slots == many.slots


def test_without_stages_there_are_two_microbatches(monkeypatch):
    assert compiled_for(Plan(mesh={"fsdp": 8}), monkeypatch) == 2


def test_microbatches_that_are_given_are_kept(monkeypatch):
    pipeline = PipelineConfig(schedule="gpipe", microbatches=12)
    plan = Plan(mesh={"stage": 4, "fsdp": 2}, pipeline=pipeline, batch=BatchConfig(accumulation=2))
    assert compiled_for(plan, monkeypatch) == 24
