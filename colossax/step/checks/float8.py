"""What matmuls in float8 do not go with."""

from collections.abc import Iterable
from typing import Any

import jax
from flax import nnx

from colossax.config import BoundPlan, MeshAxis
from colossax.errors import PlanError
from colossax.nn import Linear, ModelSpec
from colossax.pallas.target import current_target
from colossax.sharding import use
from colossax.typing import ParamInfo

_FIRST = (8, 9)
"""Compute capability of the first NVIDIA GPUs that multiply float8."""


def check_float8(bound: BoundPlan, spec: ModelSpec) -> None:
    """Refuse `plan.precision.matmul` float8 where it would be something else than is said.

    Raises:
        PlanError: The devices have no such matmuls, the model has none that would be in float8 or
            some that would not, or the plan runs them in a way that has none.
    """
    plan = bound.plan
    if plan.precision.matmul != "float8":
        return
    _check_devices(bound)
    if plan.tensor_layout != "1d" or plan.tensor_matmul not in ("auto", "compiler"):
        raise PlanError(
            "plan.precision.matmul: found 'float8', which the compiler's communication of matmuls"
            f" has alone, beside tensor_layout '{plan.tensor_layout}' and tensor_matmul"
            f" '{plan.tensor_matmul}'; give 1d and compiler, or matmul compute"
        )
    _check_model(bound, spec)
    if plan.precision.float8.scaling == "delayed":
        _check_delayed(bound)


def check_met_once(infos: Iterable[ParamInfo]) -> None:
    """Refuse histories of matrices whose results two parts of a loss read, each by itself.

    Each part knows its own gradient of such a result, and the largest number of their sum is not
    the largest of theirs.

    Args:
        infos: Of parameters that several parts of a loss read.

    Raises:
        PlanError: One of them is a history.
    """
    for info in infos:
        if info.noted:
            raise PlanError(
                "plan.precision.float8.scaling: found 'delayed', and several parts of the pipeline"
                f" multiply by '{info.path.rpartition('/')[0]}', of which each knows a part of the"
                " result's gradient and none the largest number of all of it; give current, or"
                " name a dim of the matrix in plan.precision.float8.keep"
            )


def _check_devices(bound: BoundPlan) -> None:
    with use(bound):
        target = current_target()
    if target.platform == "cpu":
        return  # emulated, to the bit
    capability = target.compute_capability
    if target.platform != "gpu" or capability is None or capability < _FIRST:
        told = (
            "" if capability is None else f" (compute capability {'.'.join(map(str, capability))})"
        )
        raise PlanError(
            f"plan.precision.matmul: found 'float8', which {bound.mesh.devices.flat[0].device_kind}"
            f"{told} does not multiply, as NVIDIA GPUs from compute capability 8.9 on do; give"
            " compute"
        )


def _check_model(bound: BoundPlan, spec: ModelSpec) -> None:
    precision = bound.plan.precision
    for info in jax.tree.leaves(spec.infos):
        grouped = len(info.dims) - info.stacked > 2 and "experts" in info.dims
        if grouped and precision.in_float8(info.dims):
            raise PlanError(
                f"plan.precision.matmul: found 'float8', and {info.path} is of experts, whose"
                " matmuls are not done in float8; add 'experts' to plan.precision.float8.keep to"
                " leave them in the compute dtype"
            )
    maps = _maps(spec)
    if not any(precision.in_float8(dims) for dims in maps.values()):
        found = ", ".join(sorted({str(dims) for dims in maps.values()}))
        raise PlanError(
            "plan.precision.matmul: found 'float8', and no matrix of the model would be: those it"
            f" multiplies by colossax.nn.Linear have dims {found or 'of no names: there are none'};"
            " take names out of plan.precision.float8.keep, or give compute"
        )


def _maps(spec: ModelSpec) -> dict[str, Any]:
    """Dims of all linear maps, by path."""
    model = spec.merge(jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, i.dtype), spec.infos))
    return {
        "/".join(map(str, path)): node.dims
        for path, node in nnx.iter_graph(model)
        if isinstance(node, Linear)
    }


def _check_delayed(bound: BoundPlan) -> None:
    plan = bound.plan
    several = plan.batch.accumulation > 1 or plan.batch.microbatch is not None
    away = plan.offload.wanted or any(not s.placement.all_on_device for s in plan.segments)
    if several and away and bound.mesh.shape[MeshAxis.STAGE] == 1:
        raise PlanError(
            "plan.precision.float8.scaling: found 'delayed', whose histories want the largest of"
            " all microbatches, and layers with several microbatches are in host memory, where"
            " gradients are added; give current"
        )
