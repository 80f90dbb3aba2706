"""The largest microbatch that fits a target."""

import dataclasses
from collections.abc import Callable

import jax

from colossax.aot import Target, target_devices
from colossax.config import BatchConfig, MeshAxis, Plan
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

    Doubles until it does not fit, then halves the interval. What is compiled is a global batch of
    two microbatches, so that gradients are accumulated as they would be. With stages it has those
    of `pipeline.microbatches`, or as many as fill the pipeline: of fewer, stages hold less.

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
    count = _microbatches(plan, target)
    batch = BatchConfig(microbatch=rows, reduce_once=plan.batch.reduce_once)
    pipeline = dataclasses.replace(plan.pipeline, microbatches=None)  # as many come of the rows
    plan = plan.replace(batch=batch, pipeline=pipeline)
    bound = plan.bind(target_devices(target))
    devices = bound.size(sorted(batch_axes(bound)))
    return _with_rows(task, count * rows * devices), plan


def _microbatches(plan: Plan, target: Target) -> int:
    """With how many a device holds as much as with any more.

    A stage holds inputs of up to `2 * stages - 1` microbatches, with chunks of those for each; in
    `gpipe` of all that there are, so that of it those count that are given.
    """
    stages = plan.mesh_sizes(target.size)[MeshAxis.STAGE]
    if stages == 1:
        return 2
    if plan.pipeline.microbatches is not None:
        return plan.batch.accumulation * plan.pipeline.microbatches
    return 2 * stages * plan.pipeline.chunks_of_stage


def _with_rows(task: Task, rows: int) -> Task:
    """The same task with another number of rows in its global batch."""
    all_dims = batch_dims(dict(task.shapes), task.options.batch_dims)
    shapes = {}
    for name, one in task.shapes.items():
        at = all_dims[name].index("batch")
        shape = (*one.shape[:at], rows, *one.shape[at + 1 :])
        shapes[name] = jax.ShapeDtypeStruct(shape, one.dtype)
    return dataclasses.replace(task, shapes=shapes)
