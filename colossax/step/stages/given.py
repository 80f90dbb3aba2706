"""Plans that stages cannot follow, refused before anything is traced."""

from colossax.config import HOST_KINDS, BoundPlan, MeshAxis
from colossax.errors import PlanError
from colossax.pipeline import Table, schedule
from colossax.sharding import batch_axes

SPLIT = ("zb_h1", "zb_v")
"""Schedules whose backward passes are in two parts."""


def table_of(bound: BoundPlan, microbatches: int) -> Table:
    """The plan's schedule of so many microbatches.

    Raises:
        PlanError: The schedule cannot have the plan's chunks.
    """
    asked, stages = bound.plan.pipeline, bound.mesh.shape[MeshAxis.STAGE]
    return schedule(asked.resolved, stages, microbatches, asked.chunks, "lockstep")


def check_stages(bound: BoundPlan) -> None:
    """Refuse what one program for all stages does not do.

    Raises:
        PlanError: Names the setting and what would work.
    """
    stages, plan = bound.mesh.shape[MeshAxis.STAGE], bound.plan
    if stages == 1:
        return
    if plan.pipeline.schedule in SPLIT:
        raise PlanError(
            f"plan.pipeline.schedule: '{plan.pipeline.schedule}' is priced and drawn but not run in"
            " this version; give 1f1b, or interleaved with chunks"
        )
    table_of(bound, 1)
    _check_offload(bound)
    if plan.batch.reduce_once and batch_axes(bound):
        raise PlanError(
            "plan.batch.reduce_once: stages reduce gradients for each microbatch in this version;"
            " switch it off, or use a preset such as zero2"
        )


def _check_offload(bound: BoundPlan) -> None:
    """Refuse what of layers that stages share cannot be elsewhere than on their devices."""
    plan, stages = bound.plan, bound.mesh.shape[MeshAxis.STAGE]
    offload, placements = plan.offload, [segment.placement for segment in plan.segments]
    known = "stages have all gradients before layers are updated"
    fetched = offload.parameters == 1 or any(each.params_on_host for each in placements)
    refused = [
        ("auto", offload.auto, "shares are not searched for; give each as 0 or 1"),
        ("fused", offload.fused, f"{known}; switch it off"),
        (
            "clipping",
            offload.wanted and offload.clipping != "stack",
            f"{known}, so '{offload.clipping}' would do nothing; give clipping stack",
        ),
        (
            "disk",
            offload.disk > 0 or any(each.optimizer_on_disk for each in placements),
            "layers that they share have no state in a file; give disk 0",
        ),
        (
            "cpu_update",
            offload.cpu_update not in ("off", 0) or any(p.updated_by_cpu for p in placements),
            "the CPU updates no layers that they share; give cpu_update off",
        ),
        (
            "activations",
            any(each.saved_on_host for each in placements),
            "what they keep goes to host memory by no name but input; give activations",
        ),
        *(
            (
                kind,
                getattr(offload, kind) not in (0, 1),
                "every stage does the same with each of its layers; give 0 or 1",
            )
            for kind in HOST_KINDS
        ),
        (
            "parameters",
            fetched and plan.pipeline.chunks > 1,
            "a layer of each chunk would be fetched for one; give plan.pipeline.chunks 1",
        ),
        (
            "parameters",
            fetched and plan.pipeline.gather == "step",
            "weights gathered once a step are on the devices; give plan.pipeline.gather microbatch",
        ),
    ]
    for setting, found, problem in refused:
        if found:
            raise PlanError(
                f"plan.offload.{setting}: with {stages} stages {problem}, or mesh axis 'stage'"
                " size 1"
            )
