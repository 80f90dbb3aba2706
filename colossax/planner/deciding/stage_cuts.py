"""Where layers are cut into stages: `plan.pipeline.cuts` auto.

By speeds that are given or were measured, the memory of each stage's devices, and what is counted
of each layer (`layer_costs`).
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from colossax.aot import Target
from colossax.config import (
    MESH_AXES,
    BatchConfig,
    BoundPlan,
    MeshAxis,
    OffloadConfig,
    PipelineConfig,
    Plan,
)
from colossax.errors import PlanError
from colossax.offload import DEVICE_SHARE, Agree, device_memory
from colossax.pipeline import Table, schedule
from colossax.pipeline.cuts import StageDevice
from colossax.planner.counting.flops import peak_flops
from colossax.planner.counting.layer_costs import StackCosts, stack_costs
from colossax.planner.deciding.cutting import Cutting
from colossax.planner.deciding.stage_speeds import CUTS, links_of, speeds_of
from colossax.sharding import batch_axes
from colossax.sharding.rules import chunks_of
from colossax.step.microbatches import batch_dims, num_microbatches
from colossax.step.options import StepOptions
from colossax.step.step import Step

_LOG = logging.getLogger(__name__)

Build = Callable[[Plan, Sequence[jax.Device], StepOptions], Step]
"""The step of a plan on devices, with options."""


def with_stage_cuts(
    plan: Plan,
    devices: Sequence[jax.Device],
    options: StepOptions,
    build: Build,
    *,
    recipe: str | None = None,
    target: Target | None = None,
    agree: Agree = lambda make: make(),
) -> tuple[Plan, str | None]:
    """The plan with layers of each chunk in place of `pipeline.cuts` auto, and why, in one line.

    Args:
        plan: Unchanged, without a line, where cuts are given or there are none.
        devices: Of the whole mesh.
        options: Of the step, with a global batch's shapes.
        build: See `Build`.
        recipe: Under whose name speeds were measured; None: none were.
        target: GPUs that are not there, whose devices those are.
        agree: With several processes, `Group.from_first`.

    Raises:
        PlanError: There is one stage, or more chunks than layers; shapes of the batch, or speeds of
            devices of several kinds, are not known; no cuts fit the devices.

    Cost: see `stack_costs` and `cut_layers`. Nothing is compiled.
    """
    if plan.pipeline.cuts != "auto":
        return plan, None
    bound = plan.bind(devices)
    _check(bound, options)
    found = agree(lambda: _decided(bound, options, build, recipe, target))
    line = f"{CUTS}: {found['line']}"
    _LOG.info(line)
    pipeline = dataclasses.replace(plan.pipeline, cuts=tuple(found["cuts"]), order=found["order"])
    return plan.replace(pipeline=pipeline), line


def _check(bound: BoundPlan, options: StepOptions) -> None:
    asked, stages = bound.plan.pipeline, bound.mesh.shape[MeshAxis.STAGE]
    if stages == 1:
        raise PlanError(
            f"{CUTS}: mesh axis 'stage' has size 1, so there is nothing to cut; give stages, as"
            " --plan.mesh stage=4,fsdp=2, or leave the cuts out (none)"
        )
    if asked.resolved == "interleaved" and asked.chunks == 1:
        raise PlanError(
            f"{CUTS}: auto finds the layers of each chunk, not how many chunks a stage has, and"
            " schedule 'interleaved' wants several; give plan.pipeline.chunks 2 or more"
        )
    cuts = (1,) * (stages * asked.chunks_of_stage)
    ones = dataclasses.replace(asked, cuts=cuts, order=None)
    chunks_of(bound.replace(pipeline=ones))
    if options.shapes is None:
        raise PlanError(
            f"{CUTS}: what layers take depends on the tokens of a batch, and they are not known;"
            " give a batch or its shapes, as in boost(..., shapes=batch), or the layers of each"
            " stage, as 10,8,8,6"
        )


def _decided(
    bound: BoundPlan,
    options: StepOptions,
    build: Build,
    recipe: str | None,
    target: Target | None,
) -> dict[str, Any]:
    """Layers of each chunk, order of the devices, and the line; as JSON, for other processes.

    Kinds of devices are compared by their peaks in the compute dtype: those of float8 are in
    the same proportion.
    """
    grid, asked = bound.mesh.devices, bound.plan.pipeline
    rows = [list(stage.flat) for stage in np.moveaxis(grid, MESH_AXES.index(MeshAxis.STAGE), 0)]
    kinds = [[device.device_kind for device in stage] for stage in rows]
    peak = functools.partial(peak_flops, dtype=bound.plan.precision.compute)
    speeds = speeds_of(kinds, _ordered(asked), recipe, peak=None if target is None else peak)
    table, shapes = _microbatch(bound, options)
    alone = dataclasses.replace(options, shapes=shapes, disk=None)
    costs = _costs(bound, rows[0], alone, build, sums=table.microbatches > 1)
    rate, links = speeds.flops_per_s, None
    if rate is not None:
        costs, links = costs.at(rate * len(rows[0])), links_of(kinds, recipe)
    memory = [_memory(stage, target, costs.working_bytes) for stage in rows]
    stages = [
        StageDevice(speed=speed, memory_bytes=room, kind=stage[0])
        for speed, room, stage in zip(speeds.relative, memory, kinds, strict=True)
    ]
    given = asked.order if isinstance(asked.order, tuple) else None
    cutting = Cutting(costs=costs, stages=stages, table=table, links=links, order=given)
    cuts, order, told = cutting.decided(search=asked.order == "auto")
    line = [cuts.compared if rate is None else cuts.line, *told, speeds.known_by]
    if links is not None:
        line.append("links as colossax bench links measured")
    if asked.gather == "step" or bound.plan.batch.reduce_once:
        line.append("weights and gradients that are whole for a step are not in the memory counted")
    order = order if asked.order == "auto" else asked.order
    return {"cuts": list(cuts.layers), "order": order, "line": "; ".join(line)}


def _ordered(asked: PipelineConfig) -> Sequence[float] | None:
    """Speeds of the stages, which are given of devices as they come."""
    if asked.speeds is None or not isinstance(asked.order, tuple):
        return asked.speeds
    if len(asked.speeds) != len(asked.order):
        return asked.speeds  # refused with how many there are
    return [asked.speeds[number] for number in asked.order]


def _memory(devices: Sequence[jax.Device], target: Target | None, working: float) -> float | None:
    """Of the smallest of these devices, for state and what is kept; None where nobody says."""
    found = [device_memory([device], target) for device in devices]
    known = [memory for memory in found if memory is not None]
    return max(0.0, DEVICE_SHARE * min(known) - working) if known else None


def _microbatch(
    bound: BoundPlan, options: StepOptions
) -> tuple[Table, Mapping[str, jax.ShapeDtypeStruct]]:
    """The schedule, each stage at its own pace, and shapes of one microbatch of all devices."""
    shapes = jax.eval_shape(lambda batch: batch, dict(options.shapes or {}))
    dims = batch_dims(shapes, options.batch_dims)
    count = num_microbatches(bound, shapes, dims)
    unit = bound.size(sorted(batch_axes(bound)))

    def one(name: str, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        at = dims[name].index("batch")
        rows = -(-x.shape[at] // (count * unit)) * unit
        return jax.ShapeDtypeStruct((*x.shape[:at], rows, *x.shape[at + 1 :]), x.dtype)

    asked, stages = bound.plan.pipeline, bound.mesh.shape[MeshAxis.STAGE]
    table = schedule(asked.resolved, stages, count, asked.chunks_of_stage, "free")
    return table, {name: one(name, x) for name, x in shapes.items()}


def _costs(
    bound: BoundPlan,
    devices: Sequence[jax.Device],
    options: StepOptions,
    build: Build,
    *,
    sums: bool,
) -> StackCosts:
    """Of the whole model on these devices, which are one stage's."""
    plan, sizes = bound.plan, bound.mesh.shape
    alone = plan.replace(
        mesh={axis: n for axis, n in sizes.items() if n > 1 and axis != MeshAxis.STAGE},
        pipeline=PipelineConfig(),
        batch=BatchConfig(),
        offload=OffloadConfig(),
        segments=tuple(
            dataclasses.replace(each, offload="none", mlp_share=1.0) for each in plan.segments
        ),
    )
    step = counted = build(alone, devices, options)
    if devices[0].platform != "cpu":
        attention = dataclasses.replace(plan.attention, kernel="xla")
        counted = build(alone.replace(attention=attention), devices, options)
    return stack_costs(step, counted, plan.offload, sums=sums)
