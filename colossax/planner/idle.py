"""A word where a mesh splits less than it could: one warning, of one line."""

import math
import warnings

import jax

from colossax.config import LOGICAL_DIMS, BoundPlan, MeshAxis
from colossax.errors import PlanWarning
from colossax.nn import ModelSpec
from colossax.sharding import batch_axes, param_sharding, ruled_dims, seq_axes
from colossax.typing import ParamInfo

WHOLE_SHARE = 0.1
"""Of the bytes of all parameters: what may stay whole on every device without a word."""

SHOWN = 3


def warn_of_idle(bound: BoundPlan, spec: ModelSpec) -> None:
    """Warn of mesh axes that do nothing, and where much of the parameters is not split.

    An axis does something if it splits a parameter, the batch or the sequence. One that splits the
    sequence is taken to find one: a model may have dims `seq` within though no array of its batch
    has, so of such an axis there is no word even where there is none to split. Parameters stay
    whole without a word under a plan that keeps them so, as `ddp` and `zero1` do; vectors, such as
    biases and scales of norms, always. Of sizes that devices do not divide there is a word where
    the parameters are more than `WHOLE_SHARE`.
    """
    infos = jax.tree.leaves(spec.infos)
    skipped = [info for info in infos if info.path in spec.skipped]
    found = [*_idle_axes(bound, infos), *_whole(bound, infos)]
    if not found and _share(bound, skipped, infos) <= WHOLE_SHARE:
        return
    if skipped:
        shown = [f"{i.path} {spec.skipped[i.path]}" for i in _largest_first(bound, skipped)]
        found.append(f"not divided by the devices that would split them: {_listed(shown)}")
    if unknown := _unknown(bound, infos):
        found.append(f"dims that no rule knows: {_listed(unknown)}")
    text = "; ".join(found)
    remedy = (
        "name dims that the plan's rules split, as boost(..., dims={r'up/kernel$': ('embed',"
        " 'mlp')}), or choose sizes that the axes divide"
    )
    warnings.warn(f"{text}; {remedy}", PlanWarning, stacklevel=3)


def _idle_axes(bound: BoundPlan, infos: list[ParamInfo]) -> list[str]:
    busy = set(batch_axes(bound)) | set(seq_axes(bound))
    for info in infos:
        for role in ("params", "optimizer"):
            busy.update(_axes(bound, role, info))
    if bound.stage_programs:
        busy.add(MeshAxis.STAGE.value)
    idle = [axis for axis, size in bound.mesh.shape.items() if size > 1 and axis not in busy]
    return [
        f"plan.mesh: {_named(bound, axis)} splits no parameter, nor the batch or sequence, and"
        " does nothing"
        for axis in idle
    ]


def _whole(bound: BoundPlan, infos: list[ParamInfo]) -> list[str]:
    if not _meant_to_split(bound):
        return []
    whole = [i for i in infos if len(i.shape) - i.stacked > 1 and not _axes(bound, "params", i)]
    share = _share(bound, whole, infos)
    if share <= WHOLE_SHARE:
        return []
    largest = [f"{info.path} {list(info.shape)}" for info in _largest_first(bound, whole)]
    return [f"{share:.0%} of the parameters' bytes stay whole on every device: {_listed(largest)}"]


def _meant_to_split(bound: BoundPlan) -> bool:
    """Whether the plan's rules split parameters, other than experts, over any axis there is."""
    bound = bound.stage(0) if bound.stage_programs else bound
    rules = (rule for dim, rule in bound.rules.params.items() if not dim.startswith("expert"))
    axes = {axis for rule in rules for choice in rule for axis in choice}
    return any(bound.mesh.shape[axis] > 1 for axis in axes)


def _axes(bound: BoundPlan, role: str, info: ParamInfo) -> set[str]:
    entries = param_sharding(bound, role, info).spec
    return {axis for e in entries if e for axis in ((e,) if isinstance(e, str) else e)}


def _bytes(bound: BoundPlan, info: ParamInfo) -> int:
    return math.prod(info.shape) * info.at_rest(bound.plan.precision.params).itemsize


def _share(bound: BoundPlan, some: list[ParamInfo], infos: list[ParamInfo]) -> float:
    """Of the bytes of all."""
    part, total = (sum(_bytes(bound, info) for info in which) for which in (some, infos))
    return part / max(total, 1)


def _largest_first(bound: BoundPlan, infos: list[ParamInfo]) -> list[ParamInfo]:
    return sorted(infos, key=lambda info: -_bytes(bound, info))


def _unknown(bound: BoundPlan, infos: list[ParamInfo]) -> list[str]:
    """Dims that only the model knows, with how many parameters have them."""
    known = ruled_dims(bound) | LOGICAL_DIMS
    counts: dict[str, int] = {}
    for info in infos:
        for dim in {dim for dim in info.dims if dim and dim.split(":")[0] not in known}:
            counts[dim] = counts.get(dim, 0) + 1
    return [f"'{dim}' of {count}" for dim, count in counts.items()]


def _named(bound: BoundPlan, axis: str) -> str:
    return f"axis '{axis}' of {bound.mesh.shape[axis]} devices"


def _listed(items: list[str]) -> str:
    more = len(items) - SHOWN
    return ", ".join(items[:SHOWN]) + (f" and {more} more" if more > 0 else "")
