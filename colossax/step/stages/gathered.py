"""Weights of a stage's layers gathered once a step, in place of once a microbatch and direction."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from colossax.config import BoundPlan, MeshAxis
from colossax.sharding import gathered_axes, param_sharding, resolve
from colossax.typing import ParamInfo


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
    precision = bound.plan.precision
    narrow = precision.reduction in (None, precision.compute)

    def one(x: Array, info: ParamInfo) -> Array:
        own = info.own_dtype is not None or not jnp.issubdtype(x.dtype, jnp.floating)
        if narrow and len(info.dims) > 2 and not own:
            x = x.astype(precision.compute)
        for role in ("params", "weights"):
            spec = resolve(bound, role, info.dims, info.shape, name=info.path)
            spec = PartitionSpec(MeshAxis.STAGE.value, None, *tuple(spec)[1:])
            x = jax.lax.with_sharding_constraint(x, NamedSharding(bound.mesh, spec))
        return x

    return jax.lax.optimization_barrier(jax.tree.map(one, rows, infos))


def gathered_params(bound: BoundPlan, params: Any, infos: Any) -> Any:
    """Likewise all parameters, those in no stack too, `infos` being theirs."""
    narrow = bound.plan.precision.reduction in (None, bound.plan.precision.compute)

    def one(x: Array, info: ParamInfo) -> Array:
        own = info.own_dtype is not None or not jnp.issubdtype(x.dtype, jnp.floating)
        if narrow and len(info.dims) > 1 + info.stacked and not own:
            x = x.astype(bound.plan.precision.compute)
        for role in ("params", "weights"):
            x = jax.lax.with_sharding_constraint(x, param_sharding(bound, role, info))
        return x

    return jax.lax.optimization_barrier(jax.tree.map(one, params, infos))
