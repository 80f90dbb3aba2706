"""The largest microbatch that fits a target."""

import dataclasses
from collections.abc import Callable

import jax

from colossax.aot import Target, target_devices
from colossax.config import BatchConfig, Plan
from colossax.planner.counting.compiled import compiled_task, has_stage_programs, usable_bytes
from colossax.planner.counting.counted_stages import counted_stages
from colossax.planner.counting.islands import check_one_island
from colossax.sharding import batch_axes
from colossax.step.microbatches import batch_dims
from colossax.tasks import Task


def largest_microbatch(
    task: Task, plan: Plan, target: Target, tell: Callable[[str], None] = lambda _: None
) -> int | None:
    """The most rows of each device at a time that fit, by compiling; None when not even one does.

    Doubles until it does not fit, then halves the interval; a global batch of twice as many rows
    per device is compiled, so that gradients are accumulated as they would be.

    Args:
        task: What is trained; the rows of its global batch are replaced.
        plan: Its microbatch is replaced.
        target: Where.
        tell: Called with a line after each compilation.

    Raises:
        PlanError: The target is made of islands.
    """
    check_one_island(target, "--largest-microbatch")

    def fits(rows: int) -> bool:
        with_rows = _with_microbatch(task, plan, target, rows)
        needed = _needed_bytes(*with_rows, target)
        verdict = "fits" if needed <= usable_bytes(target) else "does not fit"
        tell(f"{rows} rows per device: {needed / 2**30:.1f} GiB, {verdict}")
        return needed <= usable_bytes(target)

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low or None


def _needed_bytes(task: Task, plan: Plan, target: Target) -> int:
    """Of a device; where stages have programs of their own, of those of the fullest one."""
    if has_stage_programs(plan, target):
        return counted_stages(task, plan, target)[1].fullest.memory.total_bytes
    return compiled_task(task, plan, target)[1].device_bytes


def _with_microbatch(task: Task, plan: Plan, target: Target, rows: int) -> tuple[Task, Plan]:
    batch = BatchConfig(microbatch=rows, reduce_once=plan.batch.reduce_once)
    pipeline = dataclasses.replace(plan.pipeline, microbatches=None)  # two, below
    plan = plan.replace(batch=batch, pipeline=pipeline)
    # Along the batch are at most as many devices as in all; twice the rows make two microbatches.
    bound = plan.bind(target_devices(target))
    devices = bound.size(sorted(batch_axes(bound)))
    return _with_rows(task, 2 * rows * devices), plan


def _with_rows(task: Task, rows: int) -> Task:
    """The same task with another number of rows in its global batch."""
    all_dims = batch_dims(dict(task.shapes), task.options.batch_dims)
    shapes = {}
    for name, one in task.shapes.items():
        at = all_dims[name].index("batch")
        shape = (*one.shape[:at], rows, *one.shape[at + 1 :])
        shapes[name] = jax.ShapeDtypeStruct(shape, one.dtype)
    return dataclasses.replace(task, shapes=shapes)
