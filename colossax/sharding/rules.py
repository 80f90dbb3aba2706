"""Logical dims to PartitionSpecs."""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from colossax.config import (
    LOGICAL_DIMS,
    SEQUENCE_AXES,
    BoundPlan,
    MeshAxis,
    misspelt,
    nearest,
)
from colossax.errors import PlanError
from colossax.pipeline import Table, schedule
from colossax.sharding.expert_group import expert_group
from colossax.sharding.host import host_sharding
from colossax.typing import Dims, ParamInfo

REPLICABLE_DIMS = frozenset({"kv_heads"})
"""Dims that are replicated over an axis they are smaller than and divide."""


def resolve(
    bound: BoundPlan, role: str, dims: Dims, shape: Sequence[int], *, name: str = "array"
) -> PartitionSpec:
    """Where an array with these dims lives under the plan.

    Each dim takes the first of its rule's choices none of whose axes an earlier dim has taken, be
    they of size 1, so that the choice does not depend on sizes; with none left it is replicated.

    Args:
        bound: Plan and mesh.
        role: A field of `Rules`, or `weights`: as `params`, without the axes that split tokens,
            which is how a matmul wants its weight.
        dims: Logical names.
        shape: Sizes, one per dim.
        name: Parameter path for messages.

    Raises:
        PlanError: A size is not a multiple of the devices of the chosen axes; but what is stored
            (parameters, gradients, optimizer state) stays whole along axes of the sequence that
            do not divide it, see `left_whole`.
    """
    if len(dims) != len(shape):
        raise PlanError(
            f"{name}: names {len(dims)} dims {dims} for shape {tuple(shape)};"
            f" give one name (or None) per dim"
        )
    drop = gathered_axes(bound) if role == "weights" else frozenset()
    entries = []
    for dim, size, chosen in zip(dims, shape, _chosen(bound, role, dims, shape), strict=True):
        axes = tuple(axis for axis in chosen if axis not in drop)
        axes = dividing(bound, axes, size, optional_axes(role, dim))
        entries.append(fit(bound, axes, dim, size, name))
    return PartitionSpec(*entries)


def left_whole(bound: BoundPlan, role: str, dims: Dims, shape: Sequence[int]) -> tuple[str, ...]:
    """Axes of the sequence, and stages, over which an array lies whole as they do not divide it.

    They split tokens and layers, and no other array needs them to be right.
    """
    return tuple(
        axis
        for dim, size, axes in zip(dims, shape, _chosen(bound, role, dims, shape), strict=True)
        for axis in axes
        if axis not in dividing(bound, axes, size, optional_axes(role, dim))
    )


def _chosen(bound: BoundPlan, role: str, dims: Dims, shape: Sequence[int]) -> list[tuple[str, ...]]:
    """Of each dim the axes of size above 1 that its rule gives it."""
    rules = getattr(bound.rules, "params" if role == "weights" else role)
    taken: set[str] = set()
    found = []
    for dim, size in zip(dims, shape, strict=True):
        if dim in _BESIDE_EXPERTS:
            choice = _left(choose(rules, dim, set()), taken)
        else:
            choice = choose(rules, dim, taken)
        if dim == "experts":
            group = expert_group(bound, size)
            choice = tuple(axis for axis in choice if axis in group)
        taken.update(choice)
        found.append(_used(bound, choice))
    return found if role == "activations" else _by_width(bound, dims, shape, found)


def _by_width(
    bound: BoundPlan, dims: Dims, shape: Sequence[int], found: list[tuple[str, ...]]
) -> list[tuple[str, ...]]:
    """Stages that share the rows of a table which is nothing but looked up share its width instead.

    What is looked up is then gathered over them and not summed, which sends half as much.
    """
    if dims[-1:] != (TABLE_WIDTH,) or MeshAxis.STAGE not in found[-2]:
        return found
    width = (MeshAxis.STAGE.value, *found[-1])
    if shape[-1] % bound.size(width) or activation_axes(bound, TABLE_WIDTH):
        return found
    rows = tuple(axis for axis in found[-2] if axis != MeshAxis.STAGE)
    return [*found[:-2], rows, width]


TABLE_WIDTH = "embed:table"
"""Dim of a table's rows, of a table that is no head too."""


_BESIDE_EXPERTS = frozenset({"expert_embed", "expert_mlp"})
"""Dims that take what the dim of the experts leaves of their rule."""


def _left(choice: Sequence[str], taken: set[str]) -> tuple[str, ...]:
    return tuple(axis for axis in choice if axis not in taken)


def choose(rules: Mapping, dim: str | None, taken: set[str]) -> tuple[str, ...]:
    """The first choice that is free."""
    if dim is None:
        return ()
    choices = rules.get(dim, rules.get(dim.split(":")[0], ()))
    return next((choice for choice in choices if not taken.intersection(choice)), ())


def dividing(
    bound: BoundPlan, axes: Sequence[str], size: int, optional: frozenset[str]
) -> tuple[str, ...]:
    """These without optional ones that do not divide what the others leave."""
    devices = bound.size([axis for axis in axes if axis not in optional])
    kept = []
    for axis in axes:
        if axis in optional:
            if size % (devices * bound.mesh.shape[axis]):
                continue
            devices *= bound.mesh.shape[axis]
        kept.append(axis)
    return tuple(kept)


def optional_axes(role: str, dim: str | None) -> frozenset[str]:
    """Axes along which an array may stay whole: no stage needs a part of what is no layer."""
    whole: set[str] = set() if dim == "layers" else {MeshAxis.STAGE.value}
    return frozenset(whole if role in ("activations", "cache") else whole.union(SEQUENCE_AXES))


def fit(bound: BoundPlan, axes: tuple[str, ...], dim: str | None, size: int, name: str) -> Any:
    """An entry of a PartitionSpec; refuses axes that do not divide the size."""
    devices = bound.size(axes)
    if size % devices:
        if dim in REPLICABLE_DIMS and devices % size == 0:
            return None
        label = "' x '".join(axes)
        # A stage has layers of its own: there is no keeping them whole.
        instead = f"map '{dim}' to None or " if dim != "layers" else ""
        raise PlanError(
            f"{name}: dim '{dim}' has size {size}, which mesh axis '{label}' of {devices} devices"
            f" does not divide; {instead}choose a size of '{label}' that divides {size}"
        )
    return axes if len(axes) > 1 else (axes[0] if axes else None)


def _used(bound: BoundPlan, axes: Sequence[str]) -> tuple[str, ...]:
    """Those of size above 1."""
    return tuple(axis for axis in axes if bound.mesh.shape[axis] > 1)


def batch_axes(bound: BoundPlan) -> frozenset[str]:
    """Mesh axes of size above 1 that split the batch."""
    return frozenset(activation_axes(bound, "batch"))


def gathered_axes(bound: BoundPlan) -> frozenset[str]:
    """Mesh axes along which a matmul wants its weight gathered: those that split tokens.

    In the 3d layout a weight's own dims are split over `row` and `col` as well, each of which
    splits the batch on one side of the matmul only; there its weight stays split.
    """
    kept = {"row", "col"} if bound.plan.tensor_layout == "3d" else set()
    return batch_axes(bound).union(seq_axes(bound)) - kept


def seq_axes(bound: BoundPlan) -> tuple[str, ...]:
    """Mesh axes of size above 1 that split the sequence, outer first."""
    return activation_axes(bound, "seq")


def activation_axes(bound: BoundPlan, dim: str) -> tuple[str, ...]:
    """Mesh axes of size above 1 that split a dim of an activation which has no dim before it."""
    return _used(bound, choose(bound.rules.activations, dim, set()))


def home(bound: BoundPlan, info: ParamInfo) -> BoundPlan:
    """The devices among which a parameter is laid out: one stage's, where stages have programs."""
    return bound.stage(home_stage(bound, info)) if bound.stage_programs else bound


def home_stage(bound: BoundPlan, info: ParamInfo) -> int:
    """The stage that holds a parameter, with what mirrors it, where stages have programs.

    What is no layer is where it is read: on the stage of the first chunk, or on that of the last
    where it was made after the layers.
    """
    layout = chunks_of(bound).layout
    if info.span is None:
        return layout[-1 if info.behind else 0][0]
    first, ends = info.span[0], itertools.accumulate(bound.plan.pipeline.cuts or ())
    return layout[next(at for at, end in enumerate(ends) if first < end)][0]


@functools.lru_cache(maxsize=64)
def chunks_of(bound: BoundPlan) -> Table:
    """The plan's schedule of one microbatch: which stage has which chunk, where they have programs.

    Raises:
        PlanError: The cuts are not as many as the stages' chunks, or there is a table of one's own.
    """
    asked, stages = bound.plan.pipeline, bound.mesh.shape[MeshAxis.STAGE]
    if asked.table is not None:
        raise PlanError(
            "plan.pipeline.table: stages that are cut (plan.pipeline.cuts) follow a schedule by its"
            " name in this version; leave one of the two out"
        )
    cuts, chunks = asked.cuts or (), asked.chunks_of_stage
    if asked.resolved == "interleaved" and asked.chunks == 1:
        chunks = max(2, len(cuts) // stages)  # the cuts say how many
    if len(cuts) != stages * chunks:
        of = f" of {chunks} chunks" if chunks > 1 else ""
        raise PlanError(
            f"plan.pipeline.cuts: {len(cuts)} numbers for {stages} stages{of} under schedule"
            f" '{asked.resolved}'; give {stages * chunks}, the layers of each"
            f" {'chunk' if of else 'stage'}"
        )
    return schedule(asked.resolved, stages, 1, chunks, "free")


def param_sharding(bound: BoundPlan, role: str, info: ParamInfo) -> NamedSharding:
    """Sharding of one parameter leaf (or of what mirrors it: gradient, moment) under a role.

    In host memory where the leaf's role lives there.
    """
    bound = home(bound, info)
    spec = resolve(bound, role, info.dims, info.shape, name=info.path)
    if {"params": info.on_host, "optimizer": info.optimizer_on_host}.get(role, False):
        return host_sharding(bound.mesh, spec)
    return NamedSharding(bound.mesh, spec)


def activation_sharding(
    bound: BoundPlan, dims: Dims, shape: Sequence[int], *, name: str = "activation"
) -> NamedSharding:
    """Sharding of an array computed from a batch."""
    return NamedSharding(bound.mesh, resolve(bound, "activations", dims, shape, name=name))


def replicated(bound: BoundPlan) -> NamedSharding:
    """Whole on every device of the mesh."""
    return NamedSharding(bound.mesh, PartitionSpec())


def validate(bound: BoundPlan, infos) -> None:
    """Resolve every parameter under every role, before anything is allocated.

    Args:
        bound: Plan and mesh.
        infos: Tree with `ParamInfo` leaves.

    Raises:
        PlanError: The first parameter that does not fit, by path; a rule about no known dim; a dim
            without a rule that looks like a known one misspelt.
    """
    leaves = _leaves(infos)
    _check_rules(bound, {dim for info in leaves for dim in info.dims if dim is not None})
    known = {*LOGICAL_DIMS, *ruled_dims(bound)}
    for info in leaves:
        for dim in info.dims:
            _check_spelling(dim, known, name=info.path)
        check_parameter(bound, info)
    _check_experts(leaves)


def _check_experts(infos: Sequence[ParamInfo]) -> None:
    """Refuse experts in host memory where there are none."""
    if any("experts" in info.dims for info in infos):
        return
    if any(info.placement.experts_on_host for info in infos):
        raise PlanError(
            "plan.offload.experts: no layer of the model has experts that could be in host memory;"
            " give parameters and optimizer, which are of any layer"
        )


def check_parameter(bound: BoundPlan, info: ParamInfo) -> None:
    """Resolve one parameter under every role.

    Raises:
        PlanError: It does not fit, by path.
    """
    bound = home(bound, info)
    _check_layers(bound, info)
    for role in ("params", "weights", "gradients", "optimizer"):
        resolve(bound, role, info.dims, info.shape, name=info.path)
    for dim, size in zip(info.dims, info.shape, strict=True):
        if dim == "heads":
            check_heads(bound, size, name=info.path)


def _check_layers(bound: BoundPlan, info: ParamInfo) -> None:
    """Refuse layers that stages do not share evenly, in one program for all of them."""
    if not uneven_layers(bound, info):
        return
    stages, layers = bound.mesh.shape[MeshAxis.STAGE], info.total_layers or 0
    chunks = stages * bound.plan.pipeline.chunks_of_stage
    if info.shape[0] != layers and not layers % chunks:
        raise PlanError(
            f"plan.segments: {info.path} is of a segment of {info.shape[0]} layers, which {stages}"
            f" stages cannot share evenly; give counts that {stages} divides, or of the"
            f" {layers // chunks} layers of each stage"
        )
    if layers < chunks:
        held = f" of {chunks // stages} chunks each" if chunks > stages else ""
        raise PlanError(
            f"{info.path}: {layers} layers are fewer than {stages} stages{held} ask for; give mesh"
            f" axis 'stage' a size that leaves each{' chunk' if held else ''} a layer"
            + (", or a schedule of one chunk, as 1f1b" if held and layers >= stages else "")
        )
    each, over = divmod(layers, chunks)
    about = f" (about {each + 1} or {each} layers each)" if over else ""
    raise PlanError(
        f"{info.path}: {stages} stages cannot share {info.shape[0]} layers evenly; give"
        f" plan.pipeline.cuts auto, which cuts them unevenly{about}, or a size of mesh axis 'stage'"
        f" that divides {info.shape[0]}"
    )


def uneven_layers(bound: BoundPlan, info: ParamInfo) -> bool:
    """Whether a parameter is of layers that the plan's stages shall share and do not divide."""
    first = info.dims[:1] == ("layers",)
    axes = _chosen(bound, "params", info.dims, info.shape)[0] if first else ()
    return MeshAxis.STAGE in axes and info.shape[0] % bound.mesh.shape[MeshAxis.STAGE] != 0


def ruled_dims(bound: BoundPlan) -> set[str]:
    """Dims of which any role's rules speak, without their phases."""
    fields = dataclasses.fields(bound.plan.rules)
    return {dim.split(":")[0] for f in fields for dim in getattr(bound.plan.rules, f.name)}


def _check_spelling(dim: str | None, known: set[str], *, name: str) -> None:
    """Refuse a dim that no rule knows and that is a slip of the pen away from one that is known."""
    plain = None if dim is None else dim.split(":")[0]
    meant = None if plain is None or plain in known else misspelt(plain, known)
    if meant is not None:
        raise PlanError(
            f"{name}: no rule of the plan knows dim '{dim}'; did you mean '{meant}'? Else give it a"
            f" rule, as Rules().updated(params={{'{plain}': None}}), which leaves it whole"
        )


def check_heads(bound: BoundPlan, heads: int, *, name: str) -> None:
    """Refuse heads that the devices which exchange sequence for heads cannot share.

    Raises:
        PlanError: With the sizes and a remedy.
    """
    if MeshAxis.ULYSSES not in seq_axes(bound):
        return
    entry = resolve(bound, "activations", ("heads",), (heads,), name=name)[0]
    axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
    axes = (*axes, MeshAxis.ULYSSES.value)
    if heads % bound.size(axes):
        shown = " x ".join(f"{axis}={bound.mesh.shape[axis]}" for axis in axes)
        raise PlanError(
            f"{name}: {heads} heads cannot be shared by {shown} devices; choose sizes whose"
            f" product divides {heads}, or move devices from 'ulysses' to 'ring'"
        )


def _leaves(infos) -> list[ParamInfo]:
    return jax.tree.leaves(infos, is_leaf=lambda leaf: isinstance(leaf, ParamInfo))


def _check_rules(bound: BoundPlan, present: set[str]) -> None:
    """Refuse a rule about a dim that nothing has: most likely a misspelt one."""
    known = {*LOGICAL_DIMS, *present}
    for field in dataclasses.fields(bound.plan.rules):
        if field.name in ("activations", "cache"):
            continue  # a model's activations may have dims of their own
        for dim in getattr(bound.plan.rules, field.name):
            if dim.split(":")[0] not in known:
                raise PlanError(
                    f"plan.rules.{field.name}: no parameter has a dim '{dim}'{nearest(dim, known)}"
                )
