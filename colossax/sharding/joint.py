"""Arrays sent to as many other devices, of other processes too, on a mesh that joins both sides.

JAX copies between processes in programs alone, and a program's arrays all lie on its devices. So
each array gets a dim in front, split over the two sides: the source's shards are its first row, the
target's devices have room as the second. One program sends every shard to the device that has its
place on the other side, and what lies there is kept.
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
    """The arrays on the devices of another mesh, split as before; every process calls it alike.

    Args:
        leaves: Arrays; shapes in a process that has none of their devices.
        shardings: Of the arrays, all on one mesh.
        target: As many devices, none of them the same, in any form.

    Cost: every device of the source sends its shards once, and is sent nothing. For a moment a
    device holds two more copies of them, in device memory.
    """
    source = shardings[0].mesh
    devices = target.devices.reshape(source.devices.shape)
    there = Mesh(devices, source.axis_names, axis_types=source.axis_types)
    both = _joined(source, there)
    lifted = [
        _lifted(x, NamedSharding(both, PartitionSpec(ROLE, *s.spec)))
        for x, s in zip(leaves, shardings, strict=True)
    ]
    specs = tuple(PartitionSpec(ROLE, *s.spec) for s in shardings)
    moved = _program(both, specs)(lifted)
    return [_kept(x, NamedSharding(there, s.spec)) for x, s in zip(moved, shardings, strict=True)]


def _joined(source: Any, target: Any) -> Mesh:
    devices = np.stack([source.devices, target.devices])
    names = (ROLE, *source.axis_names)
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


@functools.lru_cache(maxsize=64)
def _program(mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> Any:
    def send_local(lifted: list[Array]) -> list[Array]:
        return [jax.lax.ppermute(x, ROLE, [(0, 1)]) for x in lifted]

    send = jax.shard_map(
        send_local, mesh=mesh, in_specs=(list(specs),), out_specs=list(specs), check_vma=False
    )
    return jax.jit(send, donate_argnums=0)


def _lifted(leaf: Any, sharding: NamedSharding) -> Array:
    """`[2, ...]`: the array, and room on the other side."""
    shape = (2, *leaf.shape)
    arrays = leaf.addressable_shards if isinstance(leaf, jax.Array) else ()
    local = {shard.device: shard.data for shard in arrays}
    room = sharding.shard_shape(shape)
    shards = []
    for device in sharding.mesh.local_devices:
        where = SingleDeviceSharding(device)
        if device in local:
            shards.append(jax.device_put(local[device], where)[None])
        else:
            shards.append(jnp.zeros(room, leaf.dtype, device=where))
    return _from_shards(shape, sharding, shards, leaf.dtype)


def _kept(x: Array, sharding: NamedSharding) -> Array:
    """The target's side alone."""
    devices = sharding.addressable_devices
    shards = [shard.data[0] for shard in x.addressable_shards if shard.device in devices]
    return _from_shards(x.shape[1:], sharding, shards, x.dtype)


def _from_shards(
    shape: tuple[int, ...], sharding: NamedSharding, shards: list[Array], dtype: Any
) -> Array:
    return jax.make_array_from_single_device_arrays(shape, sharding, shards, dtype=dtype)
