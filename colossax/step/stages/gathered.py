"""Weights of a stage's layers gathered once a step, in place of once a microbatch and direction."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from colossax.config import BoundPlan, MeshAxis
from colossax.sharding import gathered_axes, param_sharding, resolve
from colossax.typing import ParamInfo

_ROLES = ("params", "weights")


def whole(bound: BoundPlan) -> BoundPlan:
    """The plan under which parameters lie as a matmul wants them, and nothing gathers them."""
    gone = gathered_axes(bound)

    def less(choices: Any) -> Any:
        return tuple(tuple(axis for axis in choice if axis not in gone) for choice in choices)

    rules = bound.plan.rules
    params = {dim: less(choices) for dim, choices in rules.params.items()}
    return bound.replace(rules=dataclasses.replace(rules, params=params))


def gathered_once(bound: BoundPlan, rows: tuple[Any, ...], infos: tuple[Any, ...]) -> Any:
    """Parameters of the stages' layers, whole along the axes that split tokens.

    Matrices in the dtype in which they are multiplied, but where their gradients are to be summed
    in another; vectors, and what has a dtype of its own, as they are.

    Args:
        bound: Plan and devices.
        rows: Of each chunk, `[stages, layers of a stage, ...]`.
        infos: Likewise.

    Cost: per device, the bytes of a stage's weights over `tensor`; each is gathered once.
    """

    def one(x: Array, info: ParamInfo) -> Array:
        specs = [resolve(bound, role, info.dims, info.shape, name=info.path) for role in _ROLES]
        by_stage = [PartitionSpec(MeshAxis.STAGE.value, None, *tuple(spec)[1:]) for spec in specs]
        return _laid(bound, x, info, by_stage)

    return jax.lax.optimization_barrier(jax.tree.map(one, rows, infos))


def gathered_params(bound: BoundPlan, params: Any, infos: Any) -> Any:
    """All parameters likewise, those in no stack too.

    Args:
        bound: Plan and devices.
        params: As they are.
        infos: Theirs.
    """

    def one(x: Array, info: ParamInfo) -> Array:
        return _laid(bound, x, info, [param_sharding(bound, role, info).spec for role in _ROLES])

    return jax.lax.optimization_barrier(jax.tree.map(one, params, infos))


def _laid(bound: BoundPlan, x: Array, info: ParamInfo, specs: Sequence[PartitionSpec]) -> Array:
    """First where it is, in the dtype in which it is to be sent, then where it is wanted."""
    precision = bound.plan.precision
    narrow = precision.reduction in (None, precision.compute)
    own = info.own_dtype is not None or not jnp.issubdtype(x.dtype, jnp.floating)
    if narrow and len(info.dims) > 1 + info.stacked and not own:
        x = x.astype(precision.compute)
    for spec in specs:
        x = jax.lax.with_sharding_constraint(x, NamedSharding(bound.mesh, spec))
    return x
