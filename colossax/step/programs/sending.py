"""Arrays of a whole mesh as one stage has them, and from stage to stage."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from colossax.config import BoundPlan
from colossax.step.programs.ahead import Absent, joined
from colossax.step.programs.processes import Way, on_other_devices, sent_between, way


def of_stage(tree: Any, here: BoundPlan) -> Any:
    """Arrays that lie alike on all stages, as those of one: the same memory. Others are sent.

    A process that has none of the stage's devices gets shapes.
    """
    devices = set(here.mesh.devices.flat)

    def one(x: Any) -> Any:
        if isinstance(x, Absent):
            return x.on(here)
        if not here.mesh.local_devices:
            return jax.ShapeDtypeStruct(x.shape, x.dtype)
        sharding = NamedSharding(here.mesh, spec_of(x))
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
        there = [part for part in parts if isinstance(part, jax.Array)]
        spec = spec_of(there[0]) if there else PartitionSpec()
        shards = [shard.data for part in there for shard in part.addressable_shards]
        sharding = NamedSharding(bound.mesh, spec)
        return jax.make_array_from_single_device_arrays(
            parts[0].shape, sharding, shards, dtype=parts[0].dtype
        )

    return jax.tree.map(one, *trees)


def sent(
    tree: Any,
    source: BoundPlan,
    there: BoundPlan,
    specs: Callable[[Any], Any] | None = None,
    *,
    passed: bool = False,
) -> Any:
    """Arrays of one stage on the devices of another, split as they are; nobody waits.

    Args:
        tree: The arrays; shapes in a process that has no part of them.
        source: Where they are.
        there: Where they shall be.
        specs: How the tree is split on its way between processes, alike in all; None: whole.
        passed: Whether a chunk leaves it for another, of each microbatch; so it is counted.

    Returns:
        The arrays; shapes in a process that gets no part of them.
    """
    leaves, structure = jax.tree.flatten(tree)
    if any(isinstance(x, Absent) for x in leaves):
        return jax.tree.unflatten(structure, [x.on(there, passed=passed) for x in leaves])
    how = way(source.mesh, there.mesh)
    if how is Way.COPY:
        shardings = [NamedSharding(there.mesh, spec_of(x)) for x in leaves]
        return jax.tree.unflatten(structure, jax.device_put(leaves, shardings))
    if how is Way.BESIDE:
        moved = [on_other_devices(x, source.mesh, there.mesh) for x in leaves]
    else:
        plain = [PartitionSpec()] * len(leaves)
        given = plain if specs is None else structure.flatten_up_to(specs(tree))
        moved = sent_between(leaves, given, source.mesh, there.mesh)
    return jax.tree.unflatten(structure, moved)


def spec_of(x: Array) -> PartitionSpec:
    """How an array is split; one that no plan has laid out is whole."""
    sharding = x.sharding
    return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
