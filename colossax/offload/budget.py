"""How many layers stay on the device: arithmetic on bytes, nothing is compiled or allocated."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from colossax.errors import PlanError
from colossax.offload.bus import Traffic, waited_bytes

GB = 10**9
HOST_RESERVE_BYTES = 16 * 2**30
"""Of the host's free memory, left to the system and to what feeds the devices, at most half."""

_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """What a layer has of one kind.

    Attributes:
        name: One of `HOST_KINDS`.
        layer_bytes: Memory it takes, where it lives.
        layer_traffic: Of a layer in a step, while it lives in host memory.
    """

    name: str
    layer_bytes: int
    layer_traffic: Traffic


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demand:
    """What a step needs of one device and of the host, per device.

    Attributes:
        layers: Of the deepest layer stack.
        device_bytes: With every layer in host memory.
        host_bytes: Likewise.
        kinds: What a layer has.
    """

    layers: int
    device_bytes: int
    host_bytes: int
    kinds: tuple[Kind, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Of the kinds."""
        return tuple(kind.name for kind in self.kinds)

    def traffic(self, resident: Mapping[str, Any]) -> Traffic:
        """Of a step with so many layers of each kind on the device; arrays give arrays."""
        away = (kind.layer_traffic.times(self.layers - resident[kind.name]) for kind in self.kinds)
        return functools.reduce(Traffic.plus, away)

    def placed(self, resident: Mapping[str, int]) -> "Residency":
        """What is needed with so many layers of each kind on the device."""
        moved = sum(kind.layer_bytes * resident[kind.name] for kind in self.kinds)
        return Residency(
            layers=self.layers,
            resident=dict(resident),
            device_bytes=self.device_bytes + moved,
            host_bytes=self.host_bytes - moved,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Residency:
    """Layers that stay on the device, and what that takes.

    Attributes:
        layers: Of the deepest layer stack.
        resident: Of them on the device, by kind.
        device_bytes: Expected of a device.
        host_bytes: Expected of the host, per device.
    """

    layers: int
    resident: Mapping[str, int]
    device_bytes: int
    host_bytes: int

    @property
    def shares(self) -> dict[str, float]:
        """Share of the layers in host memory, by kind, for `OffloadConfig`."""
        return host_shares(self.resident, self.layers)


def host_shares(resident: Mapping[str, int], layers: int) -> dict[str, float]:
    """Share of the layers in host memory, of these on the device, by kind."""
    return {name: 1 - count / layers for name, count in resident.items()}


def place(demand: Demand, *, device_bytes: int, host_bytes: int) -> Residency:
    """The layers that stay on the device: of all choices within both budgets, what leaves least
    traffic to wait for, by the rule that searches for plans use (`waited_bytes`).

    Bytes go where they save most: parameters are fetched in every pass, the optimizer's state with
    nothing beside it, and half of activations beside matmuls; so parameters come first, then whole
    layers' states, then activations (Elixir weighs chunks that stay against chunks that move
    alike). What is left of the budget below a layer of one kind goes to the next kind. Of choices
    that wait alike, the one that moves least is taken, then the smallest.

    Args:
        demand: What the step needs.
        device_bytes: Budget of a device.
        host_bytes: Budget of the host, per device.

    Raises:
        PlanError: Either is too small; the message says what would do.

    Cost: layers to the power of kinds less one, in NumPy: 1 ms for three kinds of 80 layers.
    """
    if demand.device_bytes > device_bytes:
        raise PlanError(
            f"plan.offload.device_gb: {gb_down(device_bytes)} GB are given, and a device needs"
            f" {gb_up(demand.device_bytes)} GB even with every layer in host memory; give that"
            " much, or make the step smaller: fewer tokens at a time (plan.batch), or more chunks"
            " of the vocabulary (plan.loss.vocab_chunks)"
        )
    counts = _fullest(demand, device_bytes)
    on_device = np.array([kind.layer_bytes for kind in demand.kinds]) @ counts
    on_host = demand.host_bytes - on_device
    within = np.flatnonzero(on_host <= host_bytes)
    if within.size:
        traffic = demand.traffic(dict(zip(demand.names, counts[:, within], strict=True)))
        order = np.lexsort((on_device[within], traffic.total, waited_bytes(traffic)))
        best = counts[:, within[order[0]]]
        return demand.placed(dict(zip(demand.names, map(int, best), strict=True)))
    least = int(on_host.min())
    most = max(kind.layer_bytes for kind in demand.kinds)
    enough = demand.device_bytes + demand.host_bytes - host_bytes + most
    raise PlanError(
        f"plan.offload.host_gb: {gb_up(least - host_bytes)} GB are missing: with"
        f" {gb_down(device_bytes)} GB of each device in use, {gb_up(least)} GB for each of them"
        f" stay in host memory and {gb_down(host_bytes)} GB are given; give host_gb"
        f" {gb_up(least)}, or device_gb {gb_up(enough)}, or use more devices"
    )


def _fullest(demand: Demand, device_bytes: int) -> Int[np.ndarray, "kinds choices"]:
    """For all counts of the first kinds, as many layers of the last as the budget leaves."""
    *first, last = demand.kinds
    counts = np.indices((demand.layers + 1,) * len(first)).reshape(len(first), -1)
    there = np.array([kind.layer_bytes for kind in first]) @ counts
    left = device_bytes - demand.device_bytes - there
    counts, left = counts[:, left >= 0], left[left >= 0]
    room = left // last.layer_bytes if last.layer_bytes else np.full_like(left, demand.layers)
    return np.vstack([counts, np.minimum(room, demand.layers)])


def working_set_bytes(
    *,
    vocab: int,
    embed: int,
    layers: int,
    layer_params: int,
    largest_matrix: int,
    tokens: int,
    vocab_chunks: int,
) -> dict[str, int]:
    """Device bytes of a step with every layer in host memory, by term, from formulas.

    Of a decoder with a head of its own, float32 parameters under AdamW with float32 moments (12
    bytes a parameter), bfloat16 compute, full recomputation, one microbatch, and clipping that
    keeps gradients (2 bytes a parameter). The temporaries are those of the larger of two moments:

    - while layers are updated: one layer's parameters and moments as fetched, with its gradients
      (14 bytes a parameter), and the largest matrix' new parameters and moments on their way back
      (12 bytes); the other matrices' are stored before or made later;
    - in the loss: the head as it is multiplied by (2 bytes), its gradient in float32 (4), and a
      chunk of logits with their gradient (6 bytes each).

    Args:
        vocab: Rows of embedding and head.
        embed: Width.
        layers: Layers.
        layer_params: Parameters in a layer's matrices.
        largest_matrix: Parameters in its largest one.
        tokens: Of a device in a step.
        vocab_chunks: Pieces in which logits are made.
    """
    update = {"layer": 14 * layer_params, "new matrix": 12 * largest_matrix}
    table = vocab * embed
    loss = {"head": 2 * table, "gradient": 4 * table, "logits": 6 * tokens * vocab // vocab_chunks}
    return {
        "embedding and head": 12 * 2 * table,
        "vectors": 12 * (2 * layers + 1) * embed,
        **max(update, loss, key=lambda terms: sum(terms.values())),
    }


def free_host_bytes(source: Path = _MEMINFO, group: Path = _GROUP) -> int:
    """Memory of this host that can be allocated without swapping, within the container's limit.

    Args:
        source: Linux's account of the host's memory.
        group: Folder of the process's control group (version 2), the container's.

    Raises:
        PlanError: The system does not say.
    """
    try:
        lines = source.read_text(encoding="ascii").splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        raise PlanError(
            f"plan.offload.host_gb: {source} does not say how much memory is free; give how much"
            " may be used"
        ) from None
    free = int(available.split()[1]) * 1024
    left = _left_in_group(group)
    return free if left is None else min(free, left)


def _left_in_group(group: Path) -> int | None:
    """Bytes left until the limit of a control group, whose cached files can be dropped."""
    try:
        limit, used, stat = (
            (group / name).read_text(encoding="ascii")
            for name in ("memory.max", "memory.current", "memory.stat")
        )
        cached = next(line for line in stat.splitlines() if line.startswith("inactive_file "))
        return max(0, int(limit) - int(used) + int(cached.split()[1]))
    except (OSError, ValueError, StopIteration):  # no such group, or "max": no limit
        return None


def default_host_bytes(free: int, devices: int) -> int:
    """Budget of each device in host memory: what is free, less 16 GiB or half of it.

    Args:
        free: Bytes.
        devices: Of this host, which share it evenly.
    """
    return (free - min(HOST_RESERVE_BYTES, free // 2)) // devices


def check_host_bytes(wanted: int, free: int, devices: int) -> None:
    """Refuse a budget that this host cannot give, before anything is allocated.

    Args:
        wanted: Bytes per device.
        free: Bytes of the host.
        devices: Of this host.

    Raises:
        PlanError: There is less.
    """
    if wanted * devices > free:
        raise PlanError(
            f"plan.offload.host_gb: {gb_up(wanted)} GB for each of {devices} device(s) of this"
            f" host, which has {gb_down(free)} GB of free memory; give"
            f" {gb_down(free // devices)} or less, or end what else uses it"
        )


def gb_down(size: int | float) -> str:
    """Bytes for people, to the megabyte; never more than the size."""
    return f"{math.floor(size / GB * 1000) / 1000:.3f}"


def gb_up(size: int | float) -> str:
    """Likewise, never less than the size."""
    return f"{math.ceil(size / GB * 1000) / 1000:.3f}"
