"""Arrays sent to as many other devices, of other processes too, on a mesh that joins both sides.

JAX copies between processes in programs alone, and a program's arrays all lie on its devices. So
the two sides become an axis of a mesh, and a first dim is split over them before anything else: the
source's shards, as they are, are its first half, the target's devices have room as the second. One
program sends every shard to the device that has its place on the other side, and what lies there is
kept.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import Array

ROLE = "role"
"""Mesh axis of size 2: source, target."""


def sent_across(
    leaves: Sequence[Any], shardings: Sequence[NamedSharding], target: Mesh
) -> list[Array]:
    """The arrays on the devices of another mesh, split as before.

    Every process that has devices of either side calls it alike, and in the same order among all
    programs of several processes; others may leave it out.

    Args:
        leaves: Arrays; shapes in a process that has none of their devices.
        shardings: Of the arrays, all on one mesh.
        target: As many devices, none of them the same, in any form.

    Cost: every device of the source sends its shards once, and is sent nothing. For a moment a
    device holds one more copy of them, the target's two, in device memory.
    """
    there, both = _sides(shardings[0].mesh, target)
    specs = tuple(_on_both(x, s) for x, s in zip(leaves, shardings, strict=True))
    joined = [
        _with_room(x, NamedSharding(both, spec)) for x, spec in zip(leaves, specs, strict=True)
    ]
    moved = _program(both, specs)(joined)
    return [
        _kept(x, leaf.shape, NamedSharding(there, s.spec))
        for x, leaf, s in zip(moved, leaves, shardings, strict=True)
    ]


def without_shards(shape: Any, sharding: NamedSharding) -> Array:
    """An array of which this process has no part.

    Args:
        shape: With its dtype.
        sharding: On devices of other processes.
    """
    return _from_shards(shape.shape, sharding, [], shape.dtype)


@functools.lru_cache(maxsize=4096)
def _sides(source: Any, target: Mesh) -> tuple[Mesh, Mesh]:
    """The target's devices in the form of the source, and both."""
    devices = target.devices.reshape(source.devices.shape)
    there = Mesh(devices, source.axis_names, axis_types=source.axis_types)
    names = (ROLE, *source.axis_names)
    both = np.stack([source.devices, devices])
    return there, Mesh(both, names, axis_types=(AxisType.Auto,) * len(names))


def _on_both(leaf: Any, sharding: NamedSharding) -> PartitionSpec:
    """How both sides together are split; a number becomes a row for each."""
    first, *others = sharding.spec if leaf.ndim and sharding.spec else (None,)
    axes = first if isinstance(first, tuple) else () if first is None else (first,)
    return PartitionSpec((ROLE, *axes), *others)


@functools.lru_cache(maxsize=4096)
def _program(mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> Any:
    def send_local(joined: list[Array]) -> list[Array]:
        return [jax.lax.ppermute(x, ROLE, [(0, 1)]) for x in joined]

    send = jax.shard_map(
        send_local, mesh=mesh, in_specs=(list(specs),), out_specs=list(specs), check_vma=False
    )
    return jax.jit(send)


def _with_room(leaf: Any, sharding: NamedSharding) -> Array:
    """The array, and behind it room on the other side."""
    shape = (2 * leaf.shape[0], *leaf.shape[1:]) if leaf.ndim else (2,)
    arrays = leaf.addressable_shards if isinstance(leaf, jax.Array) else ()
    local = {shard.device: shard.data for shard in arrays}
    room = sharding.shard_shape(shape)
    shards = []
    for device in sharding.mesh.local_devices:
        where = SingleDeviceSharding(device)
        if device in local:
            x = jax.device_put(local[device], where)
            shards.append(x if leaf.ndim else x[None])
        else:
            shards.append(jnp.zeros(room, leaf.dtype, device=where))
    return _from_shards(shape, sharding, shards, leaf.dtype)


def _kept(x: Array, shape: tuple[int, ...], sharding: NamedSharding) -> Array:
    """The target's side alone."""
    devices = sharding.addressable_devices
    shards = [shard.data for shard in x.addressable_shards if shard.device in devices]
    return _from_shards(shape, sharding, shards if shape else [x[0] for x in shards], x.dtype)


def _from_shards(
    shape: tuple[int, ...], sharding: NamedSharding, shards: list[Array], dtype: Any
) -> Array:
    return jax.make_array_from_single_device_arrays(shape, sharding, shards, dtype=dtype)
