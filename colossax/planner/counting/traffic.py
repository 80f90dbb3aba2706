"""What a compiled step sends: between devices and to the host, with the time of the links."""

import dataclasses
from typing import Any

from jax.sharding import Mesh

from colossax.aot import (
    Module,
    Target,
    Totals,
    TransferTotals,
    transfer_totals,
    transfers,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """Collectives of one kind along the same axes, with what they would take.

    Attributes:
        totals: Counts and bytes per device and step.
        link: Kind of connection that the slowest hop crosses.
        seconds: In rings at that link's rate.
        exposed_s: Of those, of collectives beside which nothing is computed.
    """

    totals: Totals
    link: str
    seconds: float
    exposed_s: float


ASSUMED_EFFICIENCY = 0.4
"""Share of the GPUs' peak that steps are taken to reach, recomputation counted as work, where
nothing was measured."""


RECOMPUTED = 4 / 3
"""FLOPs that run per FLOP of the model when every layer's forward pass is run twice."""


HIDING_FORMULA = (
    "tokens = GPUs x seconds of the slower direction x peak x efficiency / (4/3 x FLOPs/token);"
    f" 4/3 for recomputation, efficiency {ASSUMED_EFFICIENCY} assumed, bytes as in this step"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostTraffic:
    """What a step copies between a GPU and its host; bytes and executions per device and step.

    Attributes:
        totals: By direction.
        up_bytes: To the device.
        down_bytes: To the host.
        sync_in_loops: Executions that stop a loop until they are done.
        up_s: At the target's PCIe rate, which both directions have at the same time.
        down_s: Likewise.
        hiding_tokens: Tokens of all devices per step whose compute takes as long as the slower
            direction, by `HIDING_FORMULA`; None where the GPU's peak or the model's FLOPs are not
            known.
    """

    totals: tuple[TransferTotals, ...]
    up_bytes: int
    down_bytes: int
    sync_in_loops: int
    up_s: float
    down_s: float
    hiding_tokens: float | None

    def to_json(self) -> dict[str, Any]:
        """The facts as plain JSON types."""
        return {
            "to_device_bytes": self.up_bytes,
            "to_host_bytes": self.down_bytes,
            "to_device_s": self.up_s,
            "to_host_s": self.down_s,
            "sync_in_loops": self.sync_in_loops,
            "hiding_tokens": self.hiding_tokens,
            "hiding_formula": HIDING_FORMULA,
            "by_direction": [dataclasses.asdict(one) for one in self.totals],
        }


def host_traffic(
    hlo: str | Module, target: Target, *, flops_per_token: int | None, peak: float | None
) -> HostTraffic | None:
    """Transfers of a compiled step, and what would hide them; None where it has none.

    Args:
        hlo: The program.
        target: What it was compiled for.
        flops_per_token: Of the model, forward and backward, without recomputation; None where
            they are not known.
        peak: FLOP/s of one GPU.

    Raises:
        ValueError: A loop with transfers whose trip count is not known.
    """
    sums = transfer_totals(transfers(hlo))
    if not sums:
        return None
    moved = {one.direction: one.bytes for one in sums}
    up, down = moved.get("to_device", 0), moved.get("to_host", 0)
    rate = target.gpu.pcie_bytes_per_s
    known = peak is not None and flops_per_token is not None
    hidden_per_s = (
        target.size * peak * ASSUMED_EFFICIENCY / (RECOMPUTED * flops_per_token) if known else None
    )
    return HostTraffic(
        totals=sums,
        up_bytes=up,
        down_bytes=down,
        sync_in_loops=sum(one.sync_in_loops for one in sums),
        up_s=up / rate,
        down_s=down / rate,
        hiding_tokens=None if hidden_per_s is None else max(up, down) / rate * hidden_per_s,
    )


def link_of(sums: Totals, target: Target, mesh: Mesh, *, first: int = 0) -> Link:
    """Collectives with the link that they cross and what they take on it.

    Args:
        sums: Of a program.
        target: What it was compiled for.
        mesh: Likewise.
        first: See `Target.link`.
    """
    axes = sums.axis.split(" x ")
    known = [axis for axis in axes if axis in mesh.axis_names]
    link = target.network
    if len(known) == len(axes) or target.mixed:
        link = target.link(mesh, known if len(known) == len(axes) else (), first=first)

    def seconds(ring_bytes: int, count: int) -> float:
        return target.ring_seconds(float(ring_bytes), sums.group_size, count, link, sums.kind)

    return Link(
        totals=sums,
        link=link.name,
        seconds=seconds(sums.ring_bytes, sums.count),
        exposed_s=seconds(sums.exposed_ring_bytes, sums.exposed_count),
    )
