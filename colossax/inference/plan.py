"""A training plan made fit for one sequence."""

import dataclasses
from typing import Any

import jax
from jax.sharding import NamedSharding

from colossax.config import (
    BoundPlan,
    FrozenDict,
    MeshAxis,
    PipelineConfig,
    Placement,
    Plan,
    Rules,
    Segment,
)
from colossax.errors import PlanError
from colossax.nn import ModelSpec
from colossax.offload import resolved_segments
from colossax.sharding import param_sharding
from colossax.typing import Params


def inference_plan(plan: Plan) -> Plan:
    """`plan` without what only a batch of long rows can bear.

    Activations split neither batch nor sequence: the flat tokens of a step are few and every
    device sees them all. Weights stay where they are at rest, hidden states move to them: over
    `fsdp` a matmul sums partial products of `tokens x width` instead of gathering its weight.
    For the same reason the compiler does the communication of matmuls: the library's own regions
    divide tokens among devices. Matmuls are in the compute dtype: in float8 a scale is of all
    tokens at once, so what is said to one sequence would depend on the others. Nothing is
    recomputed, because nothing is differentiated, and of what may live in host memory there are
    parameters alone. That the optimizer's state lives there moves nothing; it stays, as do all
    shares of `plan.offload`, because a model built under `plan` has its layer stacks cut where
    they end. `parameters_alone` drops them.
    """
    return _without_training(plan, ("batch", "seq"))


def encoding_plan(plan: Plan) -> Plan:
    """`inference_plan` whose activations split the batch still: its rows are texts, read whole."""
    return _without_training(plan, ("seq",))


def _without_training(plan: Plan, together: tuple[str, ...]) -> Plan:
    """`plan` for one pass forward, these dims of activations on every device as a whole."""
    activations = {
        dim: rule
        for dim, rule in plan.rules.activations.items()
        if dim.split(":")[0] not in together
    }
    rules = dataclasses.replace(plan.rules, activations=FrozenDict(activations))
    segments = tuple(_forward_only(segment, optimizer=True) for segment in plan.segments)
    precision = dataclasses.replace(plan.precision, matmul="compute")
    return plan.replace(
        rules=rules, segments=segments, tensor_matmul="compiler", precision=precision
    )


def parameters_alone(plan: Plan) -> Plan:
    """`plan` without shares of what only training has, for a model not yet built.

    Its layer stacks are cut in fewer segments then, with stages in one if all of it is on the
    devices; parameters lie where `plan` has them.
    """
    offload = dataclasses.replace(
        plan.offload, optimizer=0.0, activations=0.0, disk=0.0, cpu_update="off"
    )
    segments = tuple(_forward_only(segment, optimizer=False) for segment in plan.segments)
    if plan.mesh.get(MeshAxis.STAGE, 1) != 1:
        plan = plan.replace(pipeline=PipelineConfig())
        if all(segment.placement.all_on_device for segment in segments):
            segments = (Segment(),)
    return plan.replace(segments=segments, offload=offload)


def _forward_only(segment: Segment, *, optimizer: bool) -> Segment:
    """Nothing recomputed, and in host memory parameters, with the optimizer's state or without."""
    there = segment.placement
    away = optimizer and there.optimizer_off_device
    placement = Placement(
        params=there.params, optimizer="host" if away else "device", experts=there.experts
    )
    return dataclasses.replace(segment, remat="none", offload=str(placement), mlp_share=1.0)


def unrolled(plan: Plan, spec: ModelSpec) -> Plan:
    """`plan` with a segment for each layer, whose arrays are read where they lie.

    Where layers are a stack that a loop slices, its weights are copied before they are multiplied,
    every step anew. Left as it is where layers are fetched from host memory, which loops do best,
    or where the plan or the model has several runs of them already.

    Args:
        plan: For inference, see `parameters_alone`.
        spec: The model as the plan has it.

    Cost: layers are compiled one by one.
    """
    stacks = getattr(spec.merge(shapes_of(spec)), "stacks", {})
    (first, *more) = plan.segments
    away = plan.offload.auto or plan.offload.parameters or not first.placement.all_on_device
    if more or away or len(stacks) != 1:
        return plan
    (stack,) = stacks.values()
    return plan.replace(segments=(dataclasses.replace(first, count=1),) * len(stack.order))


def with_stage_programs(plan: Plan, bound: BoundPlan, layers: int, cuts: Any = None) -> Plan:
    """`plan` with a program for each stage, of layers of its own; as it is where there is one.

    Args:
        plan: For inference, see `parameters_alone`.
        bound: It or one like it, on its devices.
        layers: Of the model.
        cuts: Layers of each stage; None: as many for each, the first ones one more where they are
            not divided.

    Raises:
        PlanError: There are fewer layers than stages, or `cuts` are yet to be found.
    """
    stages = bound.mesh.shape[MeshAxis.STAGE]
    if stages == 1:
        return plan
    if cuts == "auto":
        raise PlanError(
            "plan.pipeline.cuts: 'auto' is found for training alone; give the layers of each stage,"
            " as 10,8,8,6, or leave it out for equal ones (none)"
        )
    if layers < stages:
        raise PlanError(
            f"mesh axis 'stage': {layers} layers cannot be shared by {stages} stages; give {layers}"
            " or fewer"
        )
    if cuts is None:
        cuts = tuple(layers // stages + (at < layers % stages) for at in range(stages))
    return plan.replace(pipeline=PipelineConfig(cuts=cuts))


def shapes_of(spec: ModelSpec) -> Params:
    """Parameters as shapes."""
    return jax.tree.map(lambda info: jax.ShapeDtypeStruct(info.shape, info.dtype), spec.infos)


def without_programs(plan: Plan, layers: int) -> Plan:
    """`plan` without programs of stages, for a model of so many layers that was built under it.

    Its stack is cut as before, and no stage has layers of its own.
    """
    segments = resolved_segments(plan, layers)
    return plan.replace(rules=one_stack(plan.rules), segments=segments, pipeline=PipelineConfig())


def one_stack(rules: Rules) -> Rules:
    """`rules` with all layers on every stage; what other axes split stays split."""
    whole = {"layers": None}
    return rules.updated(params=whole, gradients=whole, optimizer=whole)


def together(spec: ModelSpec, bound: BoundPlan, params: Params) -> tuple[BoundPlan, Params]:
    """Parameters of stages with programs of their own, laid out over all of them.

    Every stage has all layers then; what other axes split stays split. Others are as they are, and
    shapes do.

    Cost: a copy of the parameters, which are in as many places as stages.
    """
    if not bound.stage_programs:
        return bound, params
    infos = jax.tree.leaves(spec.infos)
    layers = next(info.total_layers for info in infos if info.total_layers is not None)
    there = BoundPlan(without_programs(bound.plan, layers), bound.mesh)
    shardings = jax.tree.map(lambda info: param_sharding(there, "params", info), spec.infos)
    return there, jax.tree.map(_moved, params, shardings)


def _moved(x: Any, sharding: NamedSharding) -> Any:
    """An array elsewhere; a shape that would lie there."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.device_put(x, sharding)


def param_shapes(bound: BoundPlan, spec: ModelSpec) -> Params:
    """Parameters as shapes, each with where it will lie."""
    dtype = bound.plan.precision.params
    return jax.tree.map(
        lambda info: jax.ShapeDtypeStruct(
            info.shape, info.at_rest(dtype), sharding=param_sharding(bound, "params", info)
        ),
        spec.infos,
    )
