"""Gradients that are summed over devices once per step, not for each microbatch."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from colossax.config import AttentionConfig, BoundPlan, Rules
from colossax.errors import PlanError
from colossax.layerwise import summed
from colossax.sharding import batch_axes, param_sharding, use
from colossax.step.gradients.accumulate import LossCall, accumulate, differentiated, summarised
from colossax.step.gradients.method import GradientMethod, Gradients
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
    several = batch.accumulation > 1 or batch.microbatch is not None
    kernel = bound.plan.attention.kernel
    if several and kernel in ("cudnn", "mosaic"):
        raise PlanError(
            f"plan.attention.kernel '{kernel}' cannot run under plan.batch.reduce_once with several"
            " microbatches; give 'auto', or switch reduce_once off as preset zero2 does"
        )
    for info in jax.tree.leaves(infos):
        if several and info.update is not None:
            raise PlanError(
                f"plan.batch.reduce_once: {info.path} has a rule of its own, which needs the"
                " gradient of the whole batch; switch it off, or use a preset such as zero2"
            )
        entries = param_sharding(bound, "params", info).spec
        taken = {a for e in entries if e for a in ((e,) if isinstance(e, str) else e)} & held
        if taken:
            raise PlanError(
                f"plan.batch.reduce_once: {info.path} is split over '{min(taken)}',"
                f" which splits the batch; switch it off, or use a preset such as zero2"
            )


def reduce_once(call: LossCall, bound: BoundPlan, infos: Any, trainable: Any) -> GradientMethod:
    """Every device accumulates the gradients of its own rows; they are summed at the end.

    The devices along the batch become a dim in front of all arrays, and the plan in force inside
    does not know of them. Arguments are those of `accumulate`, which serves a single microbatch.
    """
    axes = tuple(axis for axis in bound.mesh.axis_names if axis in batch_axes(bound))
    inside = bound.replace(rules=_without(bound.plan.rules, axes), attention=_batchable(bound))
    shards = bound.size(axes)
    at_once = accumulate(call, bound, infos, trainable)

    def gradients(params: Params, variables: Any, micro: Microbatches) -> Gradients:
        if micro.count == 1:
            return at_once(params, variables, micro)
        params, frozen = split(params, trainable)
        differentiate = differentiated(call, frozen, variables)

        def of_device(rows: Batch, key: Array) -> tuple[Params, Any]:
            with use(inside):
                sums, grads = differentiate(params, rows, key, micro.term_weights)
            return accumulable(inside, infos, grads, constrain=False), sums

        def of_all(microbatch: Batch, key: Array) -> tuple[Params, Any]:
            keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(shards))
            grads, sums = jax.vmap(of_device, spmd_axis_name=axes)(microbatch, keys)
            return grads, summed(sums)

        def by_device(name: str, x: Array) -> Array:
            at = micro.dims[name].index("batch") + 1
            x = x.reshape(*x.shape[:at], shards, x.shape[at] // shards, *x.shape[at + 1 :])
            return _along(bound, axes, jnp.moveaxis(x, at, 1), 1)

        def constrain(grads: Params) -> Params:
            return jax.tree.map(lambda g, info: _unreduced(bound, axes, g, info), grads, infos)

        arrays = {name: by_device(name, x) for name, x in micro.arrays.items()}
        grads, sums = summed_up(of_all, constrain, (arrays, micro.keys))
        dtype = jnp.dtype(bound.plan.precision.reduction or bound.plan.precision.accumulation)
        grads = jax.tree.map(lambda g: _sum_devices(g, dtype), grads)
        return summarised(infos, accumulable(bound, infos, grads), sums)

    return gradients


def _batchable(bound: BoundPlan) -> AttentionConfig:
    """An attention that can stand under `vmap`: cuDNN's takes no mask there."""
    attention = bound.plan.attention
    return dataclasses.replace(attention, kernel="xla") if attention.kernel == "auto" else attention


def _without(rules: Rules, axes: tuple[str, ...]) -> Rules:
    """Rules that do not know these mesh axes."""

    def less(choices: Any) -> Any:
        return tuple(tuple(axis for axis in choice if axis not in axes) for choice in choices)

    return Rules(
        **{
            field.name: {d: less(choices) for d, choices in getattr(rules, field.name).items()}
            for field in dataclasses.fields(rules)
        }
    )


def _sum_devices(grad: Array, dtype: Any) -> Array:
    """Sum over dim 0 in this dtype; `jnp.sum` would widen bfloat16 before it is sent."""
    return jax.lax.reduce(grad.astype(dtype), jnp.zeros((), dtype), jax.lax.add, (0,))


def _along(bound: BoundPlan, axes: tuple[str, ...], x: Array, at: int) -> Array:
    spec = PartitionSpec(*[None] * at, axes)
    return jax.lax.with_sharding_constraint(x, NamedSharding(bound.mesh, spec))


def _unreduced(bound: BoundPlan, axes: tuple[str, ...], grad: Array, info: Any) -> Array:
    """`[devices along the batch, *parameter]`: each holds its own, sharded along other axes."""
    rest = param_sharding(bound, "weights", info).spec
    spec = PartitionSpec(axes, *rest)
    return jax.lax.with_sharding_constraint(grad, NamedSharding(bound.mesh, spec))
