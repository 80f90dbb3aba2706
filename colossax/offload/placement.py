"""Shares of layers as explicit runs of them."""

import dataclasses
import itertools
from collections.abc import Callable

from colossax.config import SHARES, MeshAxis, Plan, Segment
from colossax.errors import PlanError


def resolved_segments(plan: Plan, layers: int, *, before: int = 0) -> tuple[Segment, ...]:
    """The plan's segments of a stack, cut where its offload shares begin and end.

    The layers of a share are the first ones: what forward leaves last, backward wants first. Those
    that the CPU updates are the first of those that it can: segments of their own, with stacks of
    their own. Segments of each stage's layers (`stage_segments`) are one here, with what the first
    of them says.

    Args:
        plan: Whose.
        layers: Of the stack.
        before: Layers of the model's stacks before it; the cuts of a pipeline are of all of them.

    Raises:
        PlanError: The counts do not cover the layers, or shares are still to be found.
    """
    if plan.offload.auto:
        raise PlanError(
            "plan.offload 'auto': the shares are not known yet; find them with"
            " colossax.fit_offload(...), or give parameters, optimizer and activations"
        )
    given = plan.segments
    if stage_segments(plan, layers):
        given = (dataclasses.replace(given[0], count=layers),)
    runs = [
        dataclasses.replace(segment, count=count)
        for segment, count in zip(given, segment_counts(given, layers), strict=True)
    ]
    for kind in SHARES:
        runs = _offloaded(runs, kind, plan.offload.layers(kind, layers))
    reachable = sum(run.count for run in runs if _cpu_can_update(run))
    runs = _offloaded(runs, "cpu", plan.offload.cpu_layers(reachable), _cpu_can_update)
    return tuple(_in_chunks(plan, runs, layers, before))


def stage_segments(plan: Plan, layers: int) -> tuple[Segment, ...]:
    """The plan's segments where they are of the layers of each stage, in each of its chunks.

    They are where there are stages, all counts are given, and it takes several times their sum to
    cover the layers. Empty where they are of the whole stack.

    Raises:
        PlanError: They differ in what is in host memory, and parameters are one stack.
    """
    counts, stages = [segment.count for segment in plan.segments], plan.mesh.get(MeshAxis.STAGE, 1)
    if stages == 1 or -1 in counts or plan.pipeline.cuts is not None:
        return ()
    times, rest = divmod(layers, sum(counts))
    if rest or times == 1 or stages != -1 and times != stages * plan.pipeline.chunks_of_stage:
        return ()
    if len({segment.placement for segment in plan.segments}) > 1:
        raise PlanError(
            f"plan.segments: counts {tuple(counts)} are of the layers of each stage, of which all"
            " are in the same memory; give them one offload"
        )
    return plan.segments


def _in_chunks(plan: Plan, runs: list[Segment], layers: int, before: int) -> list[Segment]:
    """Runs cut where the chunks of a pipeline begin."""
    begins = {begin - before for begin in itertools.accumulate(_chunks(plan, layers, before))}
    at, cut = 0, []
    for run in runs:
        left = run.count
        while left:
            count = min([left, *(begin - at for begin in begins if begin > at)])
            cut.append(dataclasses.replace(run, count=count))
            at, left = at + count, left - count
    return cut


def _chunks(plan: Plan, layers: int, before: int) -> tuple[int, ...]:
    """Layers of each part of all stacks, or of this one, that begins a segment of its own."""
    asked = plan.pipeline
    if asked.cuts == "auto":
        raise PlanError(
            "plan.pipeline.cuts 'auto': the layers of each stage are not known yet; settle the plan"
            " with colossax.planner.settle, or give them, as 10,8,8,6"
        )
    if asked.cuts is not None:
        if sum(asked.cuts) < before + layers:
            raise PlanError(cuts_refusal(asked.cuts, before + layers))
        return asked.cuts
    chunks = asked.chunks_of_stage if plan.mesh.get(MeshAxis.STAGE, 1) != 1 else 1
    if layers % chunks:
        raise PlanError(
            f"plan.pipeline.chunks: {chunks} chunks cannot share {layers} layers evenly; give a"
            f" number that divides {layers}"
        )
    return (before, *(layers // chunks,) * chunks)


def cuts_refusal(cuts: tuple[int, ...], layers: int) -> str:
    """What to say where cuts are of another number of layers."""
    return (
        f"plan.pipeline.cuts: {', '.join(map(str, cuts))} are {sum(cuts)} layers, and the model has"
        f" {layers}; make them sum to {layers}"
    )


def segment_counts(segments: tuple[Segment, ...], layers: int) -> tuple[int, ...]:
    """Layers per segment.

    Raises:
        PlanError: They do not sum to `layers`.
    """
    fixed = sum(s.count for s in segments if s.count != -1)
    counts = tuple(layers - fixed if s.count == -1 else s.count for s in segments)
    if sum(counts) != layers or min(counts) < 1:
        raise PlanError(
            f"plan.segments: counts {tuple(s.count for s in segments)}"
            f" do not cover {layers} layers;"
            f" make them sum to {layers} or give one of them -1"
        )
    return counts


def _cpu_can_update(run: Segment) -> bool:
    return run.placement.cpu_can_update


def _offloaded(
    runs: list[Segment],
    kind: str,
    first: int,
    fits: Callable[[Segment], bool] = lambda _: True,
) -> list[Segment]:
    """The runs with `kind` of the first so many layers that fit in host memory."""
    out: list[Segment] = []
    for run in runs:
        there = min(first, run.count) if fits(run) else 0
        first -= there
        if there:
            offload = str(run.placement.with_name(kind))
            out.append(dataclasses.replace(run, count=there, offload=offload))
        if run.count > there:
            out.append(dataclasses.replace(run, count=run.count - there))
    return out
