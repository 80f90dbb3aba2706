"""Gradients that are summed over devices once per step, not for each microbatch."""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array

from colossax.config import AttentionConfig, BoundPlan, MeshAxis
from colossax.errors import PlanError
from colossax.sharding import batch_axes, param_sharding
from colossax.step.gradients.accumulate import LossCall, accumulate, differentiated, summarised
from colossax.step.gradients.method import GradientMethod, Gradients
from colossax.step.gradients.shards import Shards
from colossax.step.gradients.sums import accumulable, summed_up
from colossax.step.microbatches import Microbatches
from colossax.step.trainable import split
from colossax.typing import Batch, Params


def check_reduce_once(bound: BoundPlan, infos: Any) -> None:
    """Refuse to accumulate per-device gradients of parameters that are sharded along the batch.

    Raises:
        PlanError: Of them, of an attention that cannot run on each device's own rows, or of
            parameters with a rule of their own.
    """
    held = batch_axes(bound)
    batch = bound.plan.batch
    if not batch.reduce_once or not held:
        return
    staged, kernel = bound.mesh.shape[MeshAxis.STAGE] > 1, bound.plan.attention.kernel
    several = staged or batch.accumulation > 1 or batch.microbatch is not None
    if several and not staged and kernel in ("cudnn", "mosaic"):
        raise PlanError(
            f"plan.attention.kernel '{kernel}' cannot run under plan.batch.reduce_once with several"
            " microbatches; give 'auto', or switch reduce_once off as preset zero2 does"
        )
    role = "weights" if staged and bound.plan.pipeline.gather == "step" else "params"
    remedy = "use a preset such as zero2"
    if staged and role == "params":
        remedy = "give plan.pipeline.gather step"
    for info in jax.tree.leaves(infos):
        if several and info.update is not None:
            raise PlanError(
                f"plan.batch.reduce_once: {info.path} has a rule of its own, which needs the"
                " gradient of the whole batch; switch it off, or use a preset such as zero2"
            )
        entries = param_sharding(bound, role, info).spec
        taken = {a for e in entries if e for a in ((e,) if isinstance(e, str) else e)} & held
        if taken:
            raise PlanError(
                f"plan.batch.reduce_once: {info.path} is split over '{min(taken)}',"
                f" which splits the batch; switch it off, or {remedy}"
            )


def reduce_once(call: LossCall, bound: BoundPlan, infos: Any, trainable: Any) -> GradientMethod:
    """Every device accumulates the gradients of its own rows; they are summed at the end.

    The devices along the batch become a dim in front of all arrays, and the plan in force inside
    does not know of them. Arguments are those of `accumulate`, which serves a single microbatch.
    """
    shards = Shards(bound)
    inside = shards.inside.replace(attention=_batchable(bound))
    at_once = accumulate(call, bound, infos, trainable)

    def gradients(params: Params, variables: Any, micro: Microbatches) -> Gradients:
        if micro.count == 1:
            return at_once(params, variables, micro)
        params, frozen = split(params, trainable)
        differentiate = differentiated(call, frozen, variables)

        def of_device(rows: Batch, key: Array) -> tuple[Params, Any]:
            sums, grads = differentiate(params, rows, key, micro.weighing)
            return accumulable(inside, infos, grads, constrain=False), sums

        def of_all(microbatch: Batch, key: Array) -> tuple[Params, Any]:
            return shards.over(of_device, inside)(microbatch, shards.keys(key))

        xs = (shards.cut(micro), micro.keys)
        grads, sums = summed_up(of_all, lambda grads: shards.unreduced(grads, infos), xs, infos)
        return summarised(infos, shards.reduced(grads, infos), sums, micro)

    return gradients


def _batchable(bound: BoundPlan) -> AttentionConfig:
    """An attention that can stand under `vmap`: cuDNN's takes no mask there."""
    attention = bound.plan.attention
    return dataclasses.replace(attention, kernel="xla") if attention.kernel == "auto" else attention
