"""Where layers are cut into stages: `plan.pipeline.cuts` auto.

By speeds that are given or were measured, the memory of each stage's devices, and what is counted
of each layer (`layer_costs`).
"""

import dataclasses
import itertools
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
from colossax.errors import InputError, PlanError
from colossax.offload import DEVICE_SHARE, Agree, device_memory
from colossax.pipeline import Kind, Table, schedule
from colossax.pipeline.cuts import Cuts, StageDevice, cut_layers
from colossax.pipeline.measured import stage_speeds
from colossax.planner.layer_costs import StackCosts, stack_costs
from colossax.sharding import batch_axes
from colossax.sharding.rules import chunks_of
from colossax.step.microbatches import batch_dims, num_microbatches
from colossax.step.options import StepOptions
from colossax.step.step import Step

CUTS = "plan.pipeline.cuts auto"
"""How lines of what was decided begin."""

_LOG = logging.getLogger(__name__)

Build = Callable[[Plan, Sequence[jax.Device], StepOptions], Step]
"""The step of a plan on devices, with options."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speeds:
    """How fast each stage is, relative to the fastest, and by what one knows."""

    relative: tuple[float, ...]
    known_by: str


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
    pipeline = dataclasses.replace(plan.pipeline, cuts=tuple(found["cuts"]))
    return plan.replace(pipeline=pipeline), line


def speeds_of(
    kinds: Sequence[Sequence[str]], given: Sequence[float] | None, recipe: str | None
) -> Speeds:
    """Of each stage: as given; all alike, where devices are; else as `bench stages` measured.

    Args:
        kinds: Of each stage those of its devices, the slowest of which counts.
        given: Speeds of the stages.
        recipe: See `with_stage_cuts`.

    Raises:
        PlanError: Speeds of other numbers of stages are given; devices are of several kinds, and
            not all were measured.
    """
    if given is not None:
        if len(given) != len(kinds):
            raise PlanError(
                f"plan.pipeline.speeds: found {len(given)} for {len(kinds)} stages; give one for"
                " each"
            )
        relative = tuple(speed / max(given) for speed in given)
        return Speeds(relative=relative, known_by=f"speeds {_shown(given)} as given")
    names = sorted({kind for stage in kinds for kind in stage})
    if len(names) == 1:
        known_by = f"all devices are '{names[0]}', which count as equally fast"
        return Speeds(relative=(1.0,) * len(kinds), known_by=known_by)
    by_kind = dict(zip(names, _measured(names, recipe), strict=True))
    relative = tuple(min(by_kind[kind] for kind in stage) for stage in kinds)
    known_by = f"speeds {_shown(relative)} as colossax bench stages measured"
    return Speeds(relative=relative, known_by=known_by)


def _measured(names: Sequence[str], recipe: str | None) -> tuple[float, ...]:
    """Of kinds of devices."""
    shown = ", ".join(map(repr, names))
    remedy = "give the speed of each stage, as --plan.pipeline.speeds 2,1"
    if recipe is None:
        raise PlanError(f"{CUTS}: devices are of several kinds ({shown}); {remedy}")
    try:
        return stage_speeds(names, recipe)
    except InputError as problem:
        raise PlanError(f"{CUTS}: {problem} (plan.pipeline.speeds)") from problem


def _shown(speeds: Sequence[float]) -> str:
    return ",".join(f"{speed:.3g}" for speed in speeds)


def _check(bound: BoundPlan, options: StepOptions) -> None:
    asked, stages = bound.plan.pipeline, bound.mesh.shape[MeshAxis.STAGE]
    if stages == 1:
        raise PlanError(
            f"{CUTS}: mesh axis 'stage' has size 1, so there is nothing to cut; give stages, as"
            " --plan.mesh stage=4,fsdp=2, or leave the cuts out (none)"
        )
    ones = dataclasses.replace(asked, cuts=(1,) * (stages * asked.chunks_of_stage))
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
    """Layers of each chunk, and the line; as JSON, for other processes."""
    grid = np.moveaxis(bound.mesh.devices, MESH_AXES.index(MeshAxis.STAGE), 0)
    rows = [list(stage.flat) for stage in grid]
    kinds = [[device.device_kind for device in stage] for stage in rows]
    speeds = speeds_of(kinds, bound.plan.pipeline.speeds, recipe)
    table, shapes = _microbatch(bound, options)
    costs = _costs(bound, rows[0], dataclasses.replace(options, shapes=shapes, disk=None), build)
    memory = [_memory(stage, target, costs.working_bytes) for stage in rows]
    stages = [
        StageDevice(speed=speed, memory_bytes=room, kind=stage[0])
        for speed, room, stage in zip(speeds.relative, memory, kinds, strict=True)
    ]
    cuts = cut_chunks_of(costs, stages, table)
    return {"cuts": list(cuts.layers), "line": f"{cuts.compared}; {speeds.known_by}"}


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
    bound: BoundPlan, devices: Sequence[jax.Device], options: StepOptions, build: Build
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
    return stack_costs(step, counted, plan.offload)


def cut_chunks_of(costs: StackCosts, stages: Sequence[StageDevice], table: Table) -> Cuts:
    """The layers of each chunk, such that the slowest chunk is fastest.

    Of several chunks each counts as a stage of its own on its stage's device. They are cut as if
    memory had no bound, and where a stage's chunks then exceed it, each with its share.

    Raises:
        PlanError: There are fewer layers than chunks, or no such cuts fit.
    """
    layout, chunks = table.layout, table.chunks
    if len(layout) > len(costs.layers):
        raise PlanError(
            f"{CUTS}: {table.stages} stages of {chunks} chunks need {len(layout)} layers or more,"
            f" and there are {len(costs.layers)}; give fewer stages or chunks"
        )
    given = {
        "in_flight": _in_flight(table),
        "first": costs.first,
        "last": costs.last,
    }
    whole = [stages[stage] for stage, _ in layout]
    try:
        if chunks > 1:
            free = [dataclasses.replace(device, memory_bytes=None) for device in whole]
            cuts = cut_layers(costs.layers, free, **given)
            if _fit(cuts, stages, table):
                return cuts
            whole = [_share(device, chunks) for device in whole]
        return cut_layers(costs.layers, whole, **given)
    except PlanError as problem:
        raise PlanError(f"{CUTS}: {problem}") from problem


def _share(device: StageDevice, chunks: int) -> StageDevice:
    memory = None if device.memory_bytes is None else device.memory_bytes / chunks
    return dataclasses.replace(device, memory_bytes=memory)


def _fit(cuts: Cuts, stages: Sequence[StageDevice], table: Table) -> bool:
    """Whether the chunks of each stage are within its memory together."""
    needed = [0.0] * len(stages)
    for (stage, _), size in zip(table.layout, cuts.modelled_bytes, strict=True):
        needed[stage] += size
    pairs = zip(needed, stages, strict=True)
    return all(one.memory_bytes is None or size <= one.memory_bytes for size, one in pairs)


_KEPT = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.WEIGHT: -1}


def _in_flight(table: Table) -> list[int]:
    """Most microbatches that each chunk keeps at a time, by position."""
    orders = [table.order(stage) for stage in range(table.stages)]
    return [
        max(
            itertools.accumulate(_KEPT.get(op.kind, 0) for op in orders[stage] if op.chunk == chunk)
        )
        for stage, chunk in table.layout
    ]
