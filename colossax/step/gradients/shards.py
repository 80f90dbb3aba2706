"""The devices along the batch as a dim in front of all arrays, each with gradients of its own."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from colossax.config import BoundPlan, Rules
from colossax.layerwise import summed
from colossax.sharding import apart, batch_axes, param_sharding, use
from colossax.step.gradients.sums import accumulable
from colossax.step.microbatches import Microbatches
from colossax.typing import Batch, Params

_SHARDS = "shards"
"""The devices along the batch, to one of them."""


class Shards:
    """Gradients of each device's own rows, summed over the devices when all are there.

    Attributes:
        axes: Mesh axes along the batch.
        count: Devices along them.
        inside: The plan in force for one of them, which does not know of the others.
    """

    def __init__(self, bound: BoundPlan):
        """Bind.

        Args:
            bound: Plan and devices; some axis splits the batch.
        """
        self._bound = bound
        self.axes = tuple(axis for axis in bound.mesh.axis_names if axis in batch_axes(bound))
        self.inside = bound.replace(rules=_without(bound.plan.rules, self.axes))
        self.count = bound.size(self.axes)

    def cut(self, micro: Microbatches) -> Batch:
        """Its arrays as `[count, shards, rows of one, ...]`."""

        def one(name: str, x: Array) -> Array:
            at = micro.dims[name].index("batch") + 1
            x = x.reshape(*x.shape[:at], self.count, x.shape[at] // self.count, *x.shape[at + 1 :])
            sharding = NamedSharding(self._bound.mesh, PartitionSpec(None, self.axes))
            return jax.lax.with_sharding_constraint(jnp.moveaxis(x, at, 1), sharding)

        return {name: one(name, x) for name, x in micro.arrays.items()}

    def over(self, one: Callable, inside: BoundPlan, *, dim: int = 0) -> Callable:
        """`one(arrays, keys) -> (gradients, sums)` of a device made one of all of them.

        Args:
            one: Of a device.
            inside: The plan under which it runs.
            dim: Of the devices in what it gets; in gradients it is the first.
        """

        def of_device(arrays: Any, keys: Array) -> tuple[Params, Any]:
            with use(inside), apart(_SHARDS):
                return one(arrays, keys)

        mapped = jax.vmap(of_device, in_axes=dim, axis_name=_SHARDS, spmd_axis_name=self.axes)

        def of_all(arrays: Any, keys: Array) -> tuple[Params, Any]:
            grads, sums = mapped(arrays, keys)
            return grads, summed(sums)

        return of_all

    def keys(self, key: Array) -> Array:
        """A random key for each device."""
        return jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(self.count))

    def unreduced(self, grads: Any, infos: Any) -> Any:
        """`[shards, *parameter]`: each device holds its own, sharded along other axes."""

        def one(grad: Array, info: Any) -> Array:
            spec = PartitionSpec(self.axes, *param_sharding(self._bound, "weights", info).spec)
            return jax.lax.with_sharding_constraint(grad, NamedSharding(self._bound.mesh, spec))

        return jax.tree.map(one, grads, infos)

    def reduced(self, grads: Any, infos: Any) -> Any:
        """The sum over the devices, where the plan wants gradients."""
        precision = self._bound.plan.precision
        dtype = jnp.dtype(precision.reduction or precision.accumulation)
        grads = jax.tree.map(lambda g: _sum_devices(g, dtype), grads)
        return accumulable(self._bound, infos, grads)


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
