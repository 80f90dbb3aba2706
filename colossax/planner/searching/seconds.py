"""Seconds of a step by formula, to rank plans by.

Matmuls run at a share of the GPU's peak; collectives take `(n - 1)` latencies and their bytes at
the rate of the slowest link in their ring. Gathers of weights and sums of gradients are beside
compute, as long as that lasts; sums of activations are waited for.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from colossax.aot import Link, Target, hops
from colossax.config import MESH_AXES, FrozenDict, Plan
from colossax.errors import PlanError
from colossax.planner.counting.flops import peak_flops
from colossax.planner.searching.parts import Parts
from colossax.planner.searching.sent import Sent

MATMULS, PAIRS, HIDING, SLOWING, MEMORY = 0.65, 0.45, 0.9, 0.05, 0.8
"""Shares taken where nothing was measured: of the peak, that matmuls with weights and attention
reach; of a step's compute, that collectives can be beside; of the time of those, what they take of
the compute beside them, as they need some multiprocessors and some of the memory's rate; and of
that rate, what updates of parameters reach."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """How fast a device and its links are: assumed, or measured and put in their place.

    Attributes:
        matmuls: FLOP/s of matmuls with weights.
        pairs: FLOP/s of attention between tokens.
        memory: Bytes per second of updates and sums of gradients.
        node: Links within a node.
        network: Links between nodes.
        kinds: Links of kinds of collectives (as XLA calls them) that have their own, wherever.
        within: Likewise, where they stay within a node.
        hiding: Share of a step's compute that collectives can be beside.
        slowing: Share of their time that those take of it.
        call_s: Seconds of a call of a layer, forward and backward, beside what it multiplies.
        microbatch_s: Likewise of a microbatch.
        step_s: Likewise of a step.
    """

    matmuls: float
    pairs: float
    memory: float
    node: Link
    network: Link
    kinds: Mapping[str, Link] = FrozenDict()
    within: Mapping[str, Link] = FrozenDict()
    hiding: float = HIDING
    slowing: float = SLOWING
    call_s: float = 0.0
    microbatch_s: float = 0.0
    step_s: float = 0.0


def rates_of(target: Target, plan: Plan) -> Rates:
    """What is assumed of a target for what a plan multiplies in.

    Raises:
        PlanError: How fast its GPUs are is not known, or the plan is in float8.
    """
    peak = peak_of(target, plan)
    return Rates(
        matmuls=MATMULS * peak,
        pairs=PAIRS * peak,
        memory=MEMORY * target.gpu.memory_bytes_per_s,
        node=target.gpu.nvlink,
        network=target.network,
    )


def peak_of(target: Target, plan: Plan) -> float:
    """FLOP/s of a device.

    Raises:
        PlanError: It is not known, or the plan is in float8.
    """
    if plan.precision.multiplies_in == "float8":
        raise PlanError(
            "plan.precision: what float8 makes of a step's time the formulas do not know yet; leave"
            " it out here, and count the plan with colossax inspect"
        )
    peak = peak_flops(target.gpu.name, plan.precision.compute)
    if peak is None:
        raise PlanError(
            f"target '{target.name}': how fast a {target.gpu.name} is, is not known; give another"
        )
    return peak


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seconds:
    """Of a step.

    Attributes:
        compute: Matmuls, recomputation among them.
        waited: Collectives that compute waits for.
        beside: Those that compute can hide.
        memory: Updates, and sums of gradients of several microbatches.
        fixed: What calls, microbatches and the step take whatever their sizes.
        bus: Transfers between device and host that compute waits for.
        disk: Updates of layers whose optimizer state lies in a file.
        hiding: See `Rates`.
        slowing: See `Rates`.
    """

    compute: float
    waited: float
    beside: float
    memory: float = 0.0
    fixed: float = 0.0
    bus: float = 0.0
    disk: float = 0.0
    hiding: float = HIDING
    slowing: float = SLOWING

    @property
    def terms(self) -> dict[str, float]:
        """By name, what a step is made of: their sum is `total`."""
        return {
            "compute": self.compute,
            "waited": self.waited,
            "exposed": self.exposed,
            "slowed": self.slowed,
            "memory": self.memory,
            "bus": self.bus,
            "disk": self.disk,
            "fixed": self.fixed,
        }

    @property
    def exposed(self) -> float:
        """Of those beside compute, what it does not last for."""
        return max(0.0, self.beside - self.hiding * self.compute)

    @property
    def total(self) -> float:
        """What a step takes."""
        sent = with_sends(self.compute, self.waited, self.beside, self.hiding, self.slowing)
        return float(sent) + self.memory + self.bus + self.disk + self.fixed

    @property
    def slowed(self) -> float:
        """What collectives beside compute take of it."""
        return self.slowing * (self.beside - self.exposed)


def with_sends(compute: Any, waited: Any, beside: Any, hiding: float, slowing: float) -> Any:
    """Seconds of what is computed and sent, see `Seconds`; of numbers, or of arrays of them."""
    exposed = np.maximum(0.0, beside - hiding * compute)
    return compute + waited + exposed + slowing * (beside - exposed)


def link_along(
    target: Target, parts: Parts, axes: Sequence[str], rates: Rates | None = None
) -> Link:
    """The slowest link that a ring along these axes crosses, devices filling nodes in order."""
    return link_across(target, parts.bound.mesh.shape, axes, rates)


def link_across(
    target: Target, sizes: Mapping[str, int], axes: Sequence[str], rates: Rates | None = None
) -> Link:
    """The same of sizes by mesh axis; see `link_along`."""
    node = target.gpu.nvlink if rates is None else rates.node
    network = target.network if rates is None else rates.network
    inner = [axis for axis in MESH_AXES if axis in axes]
    if not inner:
        return node
    behind = MESH_AXES[MESH_AXES.index(inner[0]) :]
    span = math.prod(sizes.get(axis, 1) for axis in behind)
    return node if target.gpus % span == 0 else network


def link_of(one: Sent, target: Target, parts: Parts, rates: Rates) -> Link:
    """The link of a collective: its kind's own, else that along its axes."""
    return link_for(one.kind, link_along(target, parts, one.axes, rates), rates)


def link_for(kind: str, along: Link, rates: Rates) -> Link:
    """The same where the link along its axes is known."""
    link = rates.kinds.get(kind) or along
    return rates.within.get(kind, link) if link is rates.node else link


Costs = dict[tuple[str, tuple[str, ...]], tuple[float, float]]
"""By kind and axes of a collective: seconds of its hops, and bytes a second."""


def collectives_seconds(
    target: Target, parts: Parts, sent: Sequence[Sent], rates: Rates, known: Costs | None = None
) -> tuple[float, float]:
    """Seconds that are waited for, and that compute may hide; `known`, of the same mesh and rates,
    is added to."""
    found, known = [0.0, 0.0], {} if known is None else known
    for one in sent:
        key = one.kind, one.axes
        if key not in known:
            link = link_of(one, target, parts, rates)
            latency = hops(one.kind, parts.size(one.axes)) * link.latency_s
            known[key] = latency, link.bytes_per_s
        latency, bytes_per_s = known[key]
        found[one.hidden] += one.times * latency + one.bytes / bytes_per_s
    return found[0], found[1]


def hops_of(one: Sent, parts: Parts) -> float:
    """Latencies that a collective takes, every time that it runs."""
    return float(one.times * hops(one.kind, parts.size(one.axes)))
