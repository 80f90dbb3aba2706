"""The largest microbatch that fits a target."""

import dataclasses
import math
from collections.abc import Callable, Mapping

import jax

from colossax.aot import Target, target_devices
from colossax.config import BatchConfig, MeshAxis, Plan
from colossax.planner.counting.compiled import compiled_task, has_stage_programs, usable_bytes
from colossax.planner.counting.counted_stages import counted_stages
from colossax.planner.counting.islands import check_one_island
from colossax.sharding import batch_axes
from colossax.step.microbatches import batch_dims
from colossax.tasks import Task

FACTOR = 4
"""By which rows grow until they do not fit: further than a line through fewer would go, as there
are numbers of rows of which a program needs less than of fewer."""


def largest_microbatch(
    task: Task,
    plan: Plan,
    target: Target,
    tell: Callable[[str], None] = lambda _: None,
    room: float | None = None,
) -> int | None:
    """The most rows of each device at a time that fit, by compiling; None when not even one does.

    Rows grow by a factor until they do not fit. In between, bytes grow almost by the same with each
    row, so that the next number is where a line through the two ends meets the room; after two that
    did not halve what is open it is the middle, so that there are never three times as many as
    bisection would compile.
    What is compiled is a global batch of two microbatches, so that gradients are accumulated as
    they would be. With stages it has those of `pipeline.microbatches`, or as many as fill the
    pipeline: of fewer, stages hold less.

    Args:
        task: What is trained; the rows of its global batch are replaced.
        plan: Its microbatch is replaced.
        target: Where.
        tell: Called with a line after each compilation.
        room: Bytes of a device that may be taken; those that a program may use, by default.

    Raises:
        PlanError: The target is made of islands.

    Cost: compilations, six to eight as a rule.
    """
    check_one_island(target, "--largest-microbatch")
    room = usable_bytes(target) if room is None else room
    known: dict[int, int] = {}
    low, high, stalled = 0, math.inf, 0
    rows = 1
    while (wide := high - low) > 1:
        needed = known[rows] = _needed_bytes(*_with_microbatch(task, plan, target, rows), target)
        verdict = "fits" if needed <= room else "does not fit"
        tell(f"{rows} rows per device: {needed / 2**30:.1f} GiB, {verdict}")
        if needed <= room:
            low = rows
        elif rows == 1:
            return None
        else:
            high = float(rows)
        stalled = 0 if 2 * (high - low) <= wide else stalled + 1
        rows = _next(known, low, high, room, stalled=stalled % 3 == 2)
    return low


def _next(known: Mapping[int, int], low: int, high: float, room: float, *, stalled: bool) -> int:
    """Rows to compile between those that fit and those that do not."""
    if math.isinf(high):
        return FACTOR * low
    top = int(high)
    if stalled:
        return (low + top) // 2
    slope = (known[top] - known[low]) / (top - low)
    return min(max(low + 1, low + int((room - known[low]) / slope)), top - 1)


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
