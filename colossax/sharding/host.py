"""Shardings in host memory."""

from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec


def host_sharding(mesh: Mesh, spec: PartitionSpec) -> NamedSharding:
    """A sharding in pinned host memory.

    On a mesh of devices that are not there the memory kind is silently dropped; on its abstract
    mesh it is kept. Another argument of the program has to lie on the concrete mesh then.

    Raises:
        RuntimeError: The kind was dropped all the same.
    """
    sharding = NamedSharding(mesh, spec, memory_kind="pinned_host")
    if sharding.memory_kind != "pinned_host":
        abstract: Any = mesh.abstract_mesh
        sharding = NamedSharding(abstract, spec, memory_kind="pinned_host")
    if sharding.memory_kind != "pinned_host":
        raise RuntimeError(f"host memory kind was dropped: {sharding}")
    return sharding
