"""GPUs and clusters that programs can be compiled for without having them."""

import dataclasses
import functools
import json
import math
import re
from collections.abc import Mapping, Sequence, Set
from importlib import resources
from typing import Any

import numpy as np
from jax.sharding import Mesh

from colossax.config import nearest
from colossax.errors import InputError

MAX_DEVICES = 1024


def hops(kind: str, group_size: int) -> int:
    """Messages that follow one another in a collective, called as XLA calls it: around a ring of
    its group, one to a neighbour, or up a tree and down again where all get a sum.

    Source: NCCL's rings, and its double binary trees for sums among many.
    """
    if kind == "collective-permute":
        return 1
    ring = group_size - 1
    return min(ring, 2 * math.ceil(math.log2(group_size))) if kind == "all-reduce" else ring


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
class Island:
    """Nodes of equal GPUs that one network connects.

    Attributes:
        gpu: Of which every node has `gpus`.
        nodes: Nodes.
        gpus: GPUs per node, connected by NVLink.
        network: Between nodes, per GPU.
        named: Whether the text names the network.
    """

    gpu: Gpu
    nodes: int
    gpus: int
    network: Link
    named: bool = False

    @property
    def name(self) -> str:
        """As `parse_target` reads it."""
        network = f"@{self.network.name}" if self.named else ""
        return f"{self.gpu.key}:{self.nodes}x{self.gpus}{network}"

    @property
    def size(self) -> int:
        """Devices in all."""
        return self.nodes * self.gpus


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where a device of a target is: the number of its island, and of its node there."""

    island: int
    node: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """Nodes of equal GPUs, or several islands of such.

    Attributes:
        islands: One or more, in the order in which their devices are counted. Two islands are two
            even if they are alike: what is one network is written as one island.
        between: The network between islands, per GPU.
    """

    islands: tuple[Island, ...]
    between: Link

    @property
    def name(self) -> str:
        """As `parse_target` reads it."""
        return "+".join(island.name for island in self.islands)

    @property
    def size(self) -> int:
        """Devices in all."""
        return sum(island.size for island in self.islands)

    @property
    def mixed(self) -> bool:
        """Whether there are several islands."""
        return len(self.islands) > 1

    @property
    def gpu(self) -> Gpu:
        """Of a target of one island.

        Raises:
            InputError: There are several.
        """
        return self._only.gpu

    @property
    def nodes(self) -> int:
        """Of a target of one island; see `gpu`."""
        return self._only.nodes

    @property
    def gpus(self) -> int:
        """Per node, of a target of one island; see `gpu`."""
        return self._only.gpus

    @property
    def network(self) -> Link:
        """The slowest that its devices are connected by."""
        networks = [i.network for i in self.islands] + [self.between] * self.mixed
        return min(networks, key=lambda link: link.bytes_per_s)

    @property
    def apart(self) -> "tuple[Target, ...]":
        """Each island as a target of its own."""
        return tuple(dataclasses.replace(self, islands=(island,)) for island in self.islands)

    @functools.cached_property
    def places(self) -> tuple[Place, ...]:
        """Of each device. Devices fill nodes in their order, and nodes islands."""
        return tuple(
            Place(island=number, node=node)
            for number, island in enumerate(self.islands)
            for node in range(island.nodes)
            for _ in range(island.gpus)
        )

    def link(self, mesh: Mesh, axes: Sequence[str], *, first: int = 0) -> Link:
        """The slowest link that a ring along these mesh axes crosses.

        Args:
            mesh: Devices of the target, in their order.
            axes: Of the mesh; none where they are not known.
            first: Number of the mesh's first device in the target.
        """
        here = self.places[first : first + mesh.devices.size]
        groups = along(mesh.devices.shape, [mesh.axis_names.index(axis) for axis in axes])
        if not axes:
            groups = [range(mesh.devices.size)]
        found = [self.link_among({here[at] for at in group}) for group in groups]
        return min(found, key=lambda link: link.bytes_per_s)

    def link_among(self, places: Set[Place]) -> Link:
        """The slowest link between devices in these places."""
        numbers = {place.island for place in places}
        if len(numbers) > 1:
            return self.between
        island = self.islands[min(numbers)]
        return island.network if len(places) > 1 else island.gpu.nvlink

    def ring_seconds(
        self, ring_bytes: float, group_size: int, count: int, link: Link, kind: str = "all-gather"
    ) -> float:
        """Predicted seconds of collectives of this many bytes sent per device in rings.

        Each runs `hops(kind, group_size)`. Source: the usual latency-bandwidth model.
        """
        return count * hops(kind, group_size) * link.latency_s + ring_bytes / link.bytes_per_s

    @property
    def _only(self) -> Island:
        if self.mixed:
            raise InputError(
                f"target '{self.name}': is made of islands, and what is asked for is of one; give"
                f" one of them, such as --target {self.islands[0].name}"
            )
        return self.islands[0]


def along(shape: Sequence[int], dims: Sequence[int]) -> list[list[int]]:
    """Positions in a mesh of this shape, in groups that differ along these dims alone."""
    positions = np.arange(math.prod(shape)).reshape(shape)
    last = np.moveaxis(positions, list(dims), range(-len(dims), 0))
    return last.reshape(-1, math.prod(shape[dim] for dim in dims)).tolist()


def gpu_keys() -> tuple[str, ...]:
    """Names of all GPUs that can be targets."""
    return tuple(_data()["gpus"])


def parse_target(text: str, *, network: str = "ib", between: str = "ethernet") -> Target:
    """The target that `h100:1x8` (GPU, nodes, GPUs per node) names.

    Islands are joined by `+`, as in `h100:2x8@ib+a100:2x8@roce`.

    Args:
        text: Of each island a GPU of `gpu_keys()` (`a100` is `a100_80`), a colon, nodes `x` GPUs
            per node, and `@` with the network between its nodes.
        network: Between nodes where the text names none: `ib`, `roce` or `ethernet`.
        between: Between islands, likewise.

    Raises:
        InputError: Another form, an unknown GPU or network, more than 1024 devices.
    """
    networks = [_known_network(network, "--network"), _known_network(between, "--between")]
    parts = text.split("+")
    islands = tuple(_island(part, text, networks[0]) for part in parts)
    size = sum(island.size for island in islands)
    if size > MAX_DEVICES or not all(island.size for island in islands):
        found = f"{size} devices" if all(i.size for i in islands) else _empty(islands)
        raise InputError(f"target '{text}': found {found}; choose 1 to {MAX_DEVICES}")
    return Target(islands=islands, between=networks[1])


def _island(part: str, text: str, network: Link) -> Island:
    """One island of a target's text."""
    match = re.fullmatch(r"([\w]+):(\d+)x(\d+)(?:@(\w+))?", part)
    if match is None:
        where = f", island '{part}'" if part != text else ""
        raise InputError(
            f"target '{text}'{where}: write GPU:NODESxGPUS, such as h100:1x8; behind it @NETWORK,"
            " where --network is not meant; islands are joined by +"
        )
    key = _data()["aliases"].get(match.group(1), match.group(1))
    if key not in _data()["gpus"]:
        raise InputError(f"target '{text}': no GPU is called '{key}'{nearest(key, gpu_keys())}")
    named = match.group(4)
    return Island(
        gpu=_gpu(key),
        nodes=int(match.group(2)),
        gpus=int(match.group(3)),
        network=_known_network(named, f"target '{text}'") if named else network,
        named=named is not None,
    )


def _empty(islands: Sequence[Island]) -> str:
    empty = next(island for island in islands if not island.size)
    return "0 devices" if len(islands) == 1 else f"0 devices in island '{empty.name}'"


def _known_network(name: str, where: str) -> Link:
    known = _data()["networks"]
    if name not in known:
        raise InputError(f"{where}: no network is called '{name}'{nearest(name, known)}")
    return _link("networks", name)


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
