"""GPUs and clusters that programs can be compiled for without having them."""

import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from jax.sharding import Mesh

from colossax.config import nearest
from colossax.errors import InputError

MAX_DEVICES = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """A kind of connection between devices: seconds to begin, bytes per second and direction."""

    name: str
    latency_s: float
    bytes_per_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU as its data sheet and its driver describe it.

    Attributes:
        memory_bytes: What a program can allocate at most.
        memory_bytes_per_s: Of its own memory.
        bf16_flops: Dense matmuls per second at peak, in FLOPs.
        pcie_bytes_per_s: To and from the host, one way.
        device: What the compiler asks for besides, by the names of XLA's device description.
    """

    key: str
    name: str
    compute_capability: tuple[int, int]
    memory_bytes: int
    memory_bytes_per_s: float
    bf16_flops: float
    nvlink: Link
    pcie_bytes_per_s: float
    device: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """Nodes of equal GPUs.

    Attributes:
        gpu: Of which every node has `gpus`.
        nodes: Nodes.
        gpus: GPUs per node, connected by NVLink.
        network: Between nodes, per GPU.
    """

    gpu: Gpu
    nodes: int
    gpus: int
    network: Link

    @property
    def name(self) -> str:
        """As `parse_target` reads it."""
        return f"{self.gpu.key}:{self.nodes}x{self.gpus}"

    @property
    def size(self) -> int:
        """Devices in all."""
        return self.nodes * self.gpus

    def link(self, mesh: Mesh, axes: Sequence[str]) -> Link:
        """The slowest link that a ring along these mesh axes crosses.

        Devices fill nodes in their order, so an axis stays within a node when its devices do.
        """
        if self.nodes == 1:
            return self.gpu.nvlink
        sizes = mesh.devices.shape
        stride = 1
        for axis, size in reversed(list(zip(mesh.axis_names, sizes, strict=True))):
            if axis in axes and size > 1 and stride * size > self.gpus:
                return self.network
            stride *= size
        return self.gpu.nvlink if axes else self.network

    def ring_seconds(self, ring_bytes: float, group_size: int, count: int, link: Link) -> float:
        """Predicted seconds of collectives of this many bytes sent per device in rings.

        Each runs `group_size - 1` hops. Source: the usual latency-bandwidth model.
        """
        return count * (group_size - 1) * link.latency_s + ring_bytes / link.bytes_per_s


def gpu_keys() -> tuple[str, ...]:
    """Names of all GPUs that can be targets."""
    return tuple(_data()["gpus"])


def parse_target(text: str, *, network: str = "ib") -> Target:
    """The target that `h100:1x8` (GPU, nodes, GPUs per node) names.

    Args:
        text: A GPU of `gpu_keys()`, a colon, nodes `x` GPUs per node.
        network: Between nodes: `ib`, `roce` or `ethernet`.

    Raises:
        InputError: Another form, an unknown GPU or network, more than 1024 devices.
    """
    match = re.fullmatch(r"([\w]+):(\d+)x(\d+)", text)
    if match is None:
        raise InputError(f"target '{text}': write GPU:NODESxGPUS, such as h100:1x8")
    key, nodes, gpus = match.group(1), int(match.group(2)), int(match.group(3))
    if key not in _data()["gpus"]:
        raise InputError(f"target '{text}': no GPU is called '{key}'{nearest(key, gpu_keys())}")
    if network not in _data()["networks"]:
        known = _data()["networks"]
        raise InputError(f"target: no network is called '{network}'{nearest(network, known)}")
    if not 1 <= nodes * gpus <= MAX_DEVICES or gpus < 1:
        raise InputError(
            f"target '{text}': found {nodes * gpus} devices; choose 1 to {MAX_DEVICES}"
        )
    return Target(gpu=_gpu(key), nodes=nodes, gpus=gpus, network=_link("networks", network))


@functools.cache
def _data() -> dict[str, Any]:
    return json.loads(resources.files("colossax.aot").joinpath("targets.json").read_text("utf-8"))


def _link(group: str, key: str) -> Link:
    fields = _data()[group][key]
    return Link(name=key, latency_s=fields["latency_s"], bytes_per_s=float(fields["bytes_per_s"]))


def _gpu(key: str) -> Gpu:
    fields = _data()["gpus"][key]
    return Gpu(
        key=key,
        name=fields["name"],
        compute_capability=tuple(fields["compute_capability"]),
        memory_bytes=fields["memory_bytes"],
        memory_bytes_per_s=float(fields["memory_bytes_per_s"]),
        bf16_flops=float(fields["bf16_flops"]),
        nvlink=_link("nvlinks", fields["nvlink"]),
        pcie_bytes_per_s=float(fields["pcie_bytes_per_s"]),
        device=fields["device"],
    )
