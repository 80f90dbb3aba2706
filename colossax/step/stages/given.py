"""Plans that stages cannot follow, refused before anything is traced."""

from colossax.config import BoundPlan, MeshAxis
from colossax.errors import PlanError
from colossax.pipeline import Table, schedule

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
    if plan.offload.wanted or any(not s.placement.all_on_device for s in plan.segments):
        raise PlanError(
            f"plan.offload: layers that {stages} stages share stay on the devices in this version;"
            " give offload none, or mesh axis 'stage' size 1"
        )
