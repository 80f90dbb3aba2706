"""Arrays of a whole mesh as one stage has them, and from stage to stage."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from colossax.config import BoundPlan
from colossax.step.programs.ahead import Absent, joined


def of_stage(tree: Any, here: BoundPlan) -> Any:
    """Arrays that lie alike on all stages, as those of one: the same memory. Others are sent."""
    devices = set(here.mesh.devices.flat)

    def one(x: Any) -> Any:
        if isinstance(x, Absent):
            return x.on(here)
        sharding = NamedSharding(here.mesh, _spec(x))
        if not devices <= x.sharding.device_set:
            return jax.device_put(x, sharding)
        shards = [shard.data for shard in x.addressable_shards if shard.device in devices]
        return jax.make_array_from_single_device_arrays(x.shape, sharding, shards, dtype=x.dtype)

    return jax.tree.map(one, tree)


def of_all(bound: BoundPlan, trees: Sequence[Any]) -> Any:
    """What all stages have computed alike, as arrays of the whole mesh: the same memory."""

    def one(*parts: Any) -> Any:
        if isinstance(parts[0], Absent):
            return joined(bound, parts)
        spec = _spec(parts[0])
        shards = [shard.data for part in parts for shard in part.addressable_shards]
        sharding = NamedSharding(bound.mesh, spec)
        return jax.make_array_from_single_device_arrays(
            parts[0].shape, sharding, shards, dtype=parts[0].dtype
        )

    return jax.tree.map(one, *trees)


def sent(tree: Any, there: BoundPlan) -> Any:
    """Arrays of one stage on the devices of another, split as they are; nobody waits."""
    leaves, structure = jax.tree.flatten(tree)
    if any(isinstance(x, Absent) for x in leaves):
        return jax.tree.unflatten(structure, [x.on(there) for x in leaves])
    shardings = [NamedSharding(there.mesh, _spec(x)) for x in leaves]
    return jax.tree.unflatten(structure, jax.device_put(leaves, shardings))


def _spec(x: Array) -> PartitionSpec:
    sharding = x.sharding
    return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
