"""Plans that stages cannot follow, refused before anything is traced."""

from colossax.config import BoundPlan, MeshAxis
from colossax.errors import PlanError
from colossax.pipeline import Table, schedule
from colossax.sharding import batch_axes


def table_of(bound: BoundPlan, microbatches: int) -> Table:
    """The plan's schedule of so many microbatches.

    Raises:
        PlanError: The schedule cannot have the plan's chunks.
    """
    asked, stages = bound.plan.pipeline, bound.mesh.shape[MeshAxis.STAGE]
    return schedule(asked.resolved, stages, microbatches, asked.chunks_of_stage, "lockstep")


def check_stages(bound: BoundPlan) -> None:
    """Refuse what one program for all stages does not do.

    Raises:
        PlanError: Names the setting and what would work.
    """
    stages, plan = bound.mesh.shape[MeshAxis.STAGE], bound.plan
    if stages == 1:
        return
    table_of(bound, 1)
    if plan.offload.wanted or any(not s.placement.all_on_device for s in plan.segments):
        raise PlanError(
            f"plan.offload: layers that {stages} stages share stay on the devices in this version;"
            " give offload none, or mesh axis 'stage' size 1"
        )
    if plan.batch.reduce_once and batch_axes(bound):
        raise PlanError(
            "plan.batch.reduce_once: stages reduce gradients for each microbatch in this version;"
            " switch it off, or use a preset such as zero2"
        )
