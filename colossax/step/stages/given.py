"""Plans that stages cannot follow, refused before anything is traced."""

from colossax.config import BoundPlan, MeshAxis, user_path
from colossax.documents import read_small, why
from colossax.errors import PlanError
from colossax.pipeline import Table, checked, schedule
from colossax.pipeline.routes import forward_alone, routes_of
from colossax.sharding import batch_axes

_LARGEST_BYTES = 64 << 20
"""Of a file with a table; one operation takes about 20."""


def table_of(bound: BoundPlan, microbatches: int) -> Table:
    """The plan's schedule of so many microbatches.

    Raises:
        PlanError: The schedule cannot have the plan's chunks; or a table of one's own cannot be
            read or run, or is of other stages, chunks or microbatches.
    """
    if bound.plan.pipeline.table is not None:
        table = _own_table(bound)
        _check_size(bound, table, "microbatches", microbatches)
        return table
    return _named(bound, bound.plan.pipeline.resolved, microbatches)


def forward_table(bound: BoundPlan, microbatches: int) -> Table:
    """Forward passes alone, through layers that stay on the stages where the plan has them."""
    chunks = bound.plan.pipeline.chunks_of_stage
    name = "interleaved" if chunks > 1 else "1f1b"
    return forward_alone(_named(bound, name, microbatches))


def _named(bound: BoundPlan, name: str, microbatches: int) -> Table:
    stages = bound.mesh.shape[MeshAxis.STAGE]
    return schedule(name, stages, microbatches, bound.plan.pipeline.chunks_of_stage, "lockstep")


def _own_table(bound: BoundPlan) -> Table:
    """The table in the plan's file, which one program for all stages can run."""
    given = bound.plan.pipeline.table
    assert given is not None
    path = user_path(given, "plan.pipeline.table")
    try:
        table = checked(Table.from_json(read_small(path, _LARGEST_BYTES)))
        routes_of(table)
    except PlanError as problem:
        raise PlanError(f"plan.pipeline.table {given}: {problem}") from problem
    except (OSError, ValueError) as problem:
        raise PlanError(
            f"plan.pipeline.table {given}: cannot be read ({why(problem)}); name a file that"
            " Table.to_json wrote, or give plan.pipeline.schedule"
        ) from problem
    _check_size(bound, table, "stages", bound.mesh.shape[MeshAxis.STAGE])
    _check_size(bound, table, "chunks", bound.plan.pipeline.chunks_of_stage)
    return table


def _check_size(bound: BoundPlan, table: Table, name: str, size: int) -> None:
    found = getattr(table, name)
    setting = "plan.mesh stage" if name == "stages" else f"plan.pipeline.{name}"
    if found != size:
        raise PlanError(
            f"plan.pipeline.table {bound.plan.pipeline.table}: it is of {found} {name}, and the"
            f" plan has {size}; give {setting} {found}, or a table of {size}"
        )


def check_stages(bound: BoundPlan) -> None:
    """Refuse what one program for all stages does not do.

    Raises:
        PlanError: Names the setting and what would work.
    """
    stages, plan = bound.mesh.shape[MeshAxis.STAGE], bound.plan
    if stages == 1:
        return
    if plan.pipeline.table is None:
        table_of(bound, 1)
    else:
        _own_table(bound)
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
