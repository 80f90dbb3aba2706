"""How much memory of devices and host may be used: what is given, held against what is there."""

import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax

from colossax.aot import Target
from colossax.errors import PlanError
from colossax.offload.budget import GB, check_host_bytes, default_host_bytes, free_host_bytes

DEVICE_SHARE = 0.97
"""Of a device's memory, what a step may take where no budget is given. The rest is for workspaces
that tuning on the GPU will choose, the CUDA context and fragmentation."""

_PINNED_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_PINNED_DEFAULT_GIB = 64
"""Host memory that XLA gives out to GPUs at most, unless the environment says otherwise."""

Agree = Callable[[Callable[[], Any]], Any]
"""Calls a function on one of several processes and gives its JSON result on all."""


def device_memory(devices: Sequence[jax.Device], target: Target | None) -> int | None:
    """Bytes that programs can allocate on each of equal devices; None where they share the host's.

    Only this process's devices say. Of a target of islands it is that of the least of their kinds.
    """
    if target is not None:
        kinds = {device.device_kind for device in devices}
        gpus = [island.gpu for island in target.islands]
        return min(g.memory_bytes for g in gpus if not target.mixed or g.name in kinds)
    here = [device for device in devices if device.process_index == jax.process_index()]
    return (here[0].memory_stats() or {}).get("bytes_limit") if here else None


def device_budget(given_gb: float | None, memory: int | None) -> int:
    """Bytes of a device that may be used: what is given, or `DEVICE_SHARE` of its memory.

    Raises:
        PlanError: More is given than there is, or neither is known.
    """
    if given_gb is None and memory is not None:
        return int(DEVICE_SHARE * memory)
    if given_gb is None:
        raise PlanError(
            "plan.offload.device_gb: these devices do not say how much memory they have; give how"
            " much of it may be used, as in --plan.offload.device_gb 8"
        )
    if memory is not None and given_gb * GB > memory:
        raise PlanError(
            f"plan.offload.device_gb: {given_gb:g} GB are given, and a device has"
            f" {memory / GB:.1f} GB; give less, or leave it out"
        )
    return int(given_gb * GB)


def host_budget(
    given_gb: float | None, devices: Sequence[jax.Device], target: Target | None
) -> int:
    """Bytes of the host that may be used for each device.

    Args:
        given_gb: None: what is free, less 16 GiB or half of it, divided by the devices; several
            processes have to be told, as some may share a host.
        devices: All of a mesh; those of this process count.
        target: GPUs that are not there, of whose host nothing is known: it has what is given.

    Raises:
        PlanError: More is given than is free or than XLA gives out, or nothing is known.
    """
    if target is not None:
        return int((given_gb or 0) * GB)
    local = [device for device in devices if device.process_index == jax.process_index()]
    here = max(1, len(local))
    if given_gb is None:
        if jax.process_count() > 1:
            raise PlanError(
                "plan.offload.host_gb: how many of the processes share a host is not known; give"
                " how much of its memory there is for each device, as in --plan.offload.host_gb 96"
            )
        limit = _pinned_limit() if local and local[0].platform != "cpu" else None
        budget = default_host_bytes(free_host_bytes(), here)
        return budget if limit is None else min(budget, limit // here)
    wanted = int(given_gb * GB)
    check_host_bytes(wanted, free_host_bytes(), here)
    if local and local[0].platform != "cpu":
        _check_pinned(wanted * here)
    return wanted


def _pinned_limit() -> int:
    """Bytes of host memory that XLA gives out to GPUs of this process."""
    given = os.environ.get(_PINNED_LIMIT, "")
    return (int(given) if given.isdigit() else _PINNED_DEFAULT_GIB) * 2**30


def _check_pinned(wanted: int) -> None:
    if wanted > _pinned_limit():
        raise PlanError(
            f"plan.offload.host_gb: {wanted / GB:.0f} GB in all, and XLA gives GPUs"
            f" {_pinned_limit() / GB:.0f} GB of host memory at most; start with {_PINNED_LIMIT}="
            f"{math.ceil(wanted / 2**30)} in the environment"
        )


def held_bytes(tree: Any) -> int:
    """Of the device that has most of these arrays; those in host memory are on none."""
    held: Counter[Any] = Counter()
    for x in jax.tree.leaves(tree):
        if isinstance(x, jax.Array) and x.sharding.memory_kind != "pinned_host":
            size = math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
            held.update(dict.fromkeys(x.sharding.device_set, size))
    return max(held.values(), default=0)
