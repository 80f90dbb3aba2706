"""Plans that stages cannot follow, refused before anything is traced."""

from colossax.config import HOST_KINDS, BoundPlan, MeshAxis, Plan, user_path
from colossax.documents import read_small, why
from colossax.errors import PlanError
from colossax.pipeline import Kind, Table, checked, schedule
from colossax.pipeline.routes import forward_alone, in_parts, routes_of
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
        _check_microbatches(bound, table, microbatches)
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
        table = in_parts(checked(Table.from_json(read_small(path, _LARGEST_BYTES))))
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


def _check_microbatches(bound: BoundPlan, table: Table, count: int) -> None:
    batch = bound.plan.batch
    if batch.accumulation == 1 and batch.microbatch is None:
        _check_size(bound, table, "microbatches", count)
    elif table.microbatches != count:
        given = (
            f"plan.batch.microbatch {batch.microbatch}"
            if batch.microbatch is not None
            else f"plan.batch.accumulation {batch.accumulation} x plan.pipeline.microbatches"
            f" {count // batch.accumulation}"
        )
        raise PlanError(
            f"plan.pipeline.table {bound.plan.pipeline.table}: it is of {table.microbatches}"
            f" microbatches, and by {given} the batch has {count}; give a table of {count}"
        )


def check_stages(bound: BoundPlan) -> None:
    """Refuse what stages do not do; with programs of their own, of what is in host memory.

    Raises:
        PlanError: Names the setting and what would work.
    """
    stages, plan = bound.mesh.shape[MeshAxis.STAGE], bound.plan
    if stages == 1:
        return
    if bound.stage_programs:
        _check_offload(bound)
        return
    if plan.pipeline.table is None:
        table = table_of(bound, 1)
    else:
        table = _own_table(bound)
    _check_offload(bound)
    if any(op.kind is Kind.WEIGHT for _, _, op in table.operations()):
        _check_apart(bound)
    if plan.batch.reduce_once and batch_axes(bound):
        _check_reduced_once(bound)


def _check_offload(bound: BoundPlan) -> None:
    """Refuse what of stages' layers cannot be elsewhere than on their devices."""
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
            "experts",
            offload.experts > 0 or any(each.experts_on_host for each in placements),
            "experts go to host memory with their layers; give parameters and optimizer",
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
        (
            "activations",
            bound.stage_programs and any(each.named_activations for each in placements),
            "that have programs of their own all that they keep goes to host memory; give"
            " activations",
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
            fetched and plan.pipeline.chunks_of_stage > 1 and not bound.stage_programs,
            "a layer of each chunk would be fetched for one; give plan.pipeline.chunks 1",
        ),
        (
            "parameters",
            fetched and plan.pipeline.gather == "step",
            "weights gathered once a step are on the devices; give plan.pipeline.gather microbatch",
        ),
        (
            "parameters",
            fetched and bound.stage_programs and plan.batch.reduce_once,
            "weights of which each device has gradients of its own are on the devices; switch"
            " plan.batch.reduce_once off",
        ),
    ]
    for setting, found, problem in refused:
        if found:
            raise PlanError(
                f"plan.offload.{setting}: with {stages} stages {problem}, or mesh axis 'stage'"
                " size 1"
            )


def _check_reduced_once(bound: BoundPlan) -> None:
    """Refuse what gradients that are reduced once a step do not go with."""
    if not _computed_here(bound.plan):
        raise PlanError(
            "plan.batch.reduce_once: stages that reduce gradients once a step keep parameters and"
            " activations on the devices; give plan.offload optimizer alone, or switch it off"
        )


def _check_apart(bound: BoundPlan) -> None:
    """Refuse what backward passes in two parts do not go with."""
    plan, how = bound.plan, "backward in two parts"
    if len(plan.segments) > 1:
        raise PlanError(
            f"plan.segments: a schedule with {how} has one policy for all layers; give one segment,"
            " or plan.pipeline.schedule 1f1b"
        )
    if not _computed_here(plan):
        raise PlanError(
            f"plan.offload: a schedule with {how} keeps parameters and activations on the devices;"
            " give optimizer alone, or plan.pipeline.schedule 1f1b"
        )


def _computed_here(plan: Plan) -> bool:
    """Whether what layers compute with, and what they keep, is on the devices."""
    placements = [segment.placement for segment in plan.segments]
    away = plan.offload.parameters or plan.offload.activations
    return not away and all(p.params == p.activations == "device" for p in placements)
