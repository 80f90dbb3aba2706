"""The search for the largest microbatch; what it compiles is replaced by a rule."""

from collections.abc import Callable

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


RULES: dict[str, Callable[[int], float]] = {
    "a line": lambda rows: 500 + 13.7 * rows,
    "another moment needs more from 30 rows on": lambda rows: max(900 + 2 * rows, 33.0 * rows),
    "rounded up by the allocator": lambda rows: 400 + 64 * ((17 * rows + 63) // 64),
    "the same until nothing fits": lambda rows: 800 if rows < 77 else 10_000,
    "a square": lambda rows: 10 + rows * rows,
    "less from 32 rows on": lambda rows: 40 * rows if rows < 32 else 26 * rows,
    "the first row does not fit": lambda rows: 2000 * rows,
    "rows for nothing up to a thousand": lambda rows: 0.9 * rows,
}


@pytest.mark.catches("largest-stops-at-what-a-line-says")
@pytest.mark.catches("largest-never-takes-the-middle")
@pytest.mark.catches("largest-row-by-row")
@pytest.mark.catches("largest-of-nothing-is-a-row")
@pytest.mark.parametrize("name", RULES)
def test_what_is_found_is_the_most_that_fits_with_few_programs_where_bytes_are_a_line(
    name, monkeypatch
):
    rule, tried = RULES[name], []

    def needed(task, plan, target):
        tried.append(plan.batch.microbatch)
        return int(rule(plan.batch.microbatch))

    monkeypatch.setattr(largest, "target_devices", lambda target: jax.devices())
    monkeypatch.setattr(largest, "_needed_bytes", needed)
    plan = Plan(mesh={"fsdp": 8})
    found = largest_microbatch(task_of(recipe("llama_tiny")), plan, TARGET, room=1000.0)
    most = max((rows for rows in range(1, 2000) if int(rule(rows)) <= 1000), default=None)
    assert found == most
    assert len(tried) == len(set(tried))
    assert len(tried) <= MOST.get(name, 8)


MOST = {
    "another moment needs more from 30 rows on": 14,
    "the same until nothing fits": 18,
    "a square": 11,
    "rows for nothing up to a thousand": 11,
}
"""Programs, where more are needed than of a line."""
