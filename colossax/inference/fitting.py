"""How many layers stay on the devices of a model that generates: `plan.offload.auto`."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax

from colossax.config import Plan
from colossax.errors import PlanError
from colossax.inference.generator import Generator
from colossax.inference.several import Several
from colossax.offload import (
    device_budget,
    device_memory,
    gb_down,
    gb_up,
    host_budget,
)

MAX_COMPILES = 3

MakeGenerator = Callable[[Plan], Generator | Several]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fitted:
    """A plan whose generating step is within its budgets.

    Attributes:
        plan: With a share of the layers in host memory in place of `auto`.
        layers: Of the model.
        resident: Of them on the device.
        device_bytes: Of a device: parameters, cache and temporaries, as compiled.
        host_bytes: Of the host, for each device.
        compiles: How many it took.
    """

    plan: Plan
    layers: int
    resident: int
    device_bytes: int
    host_bytes: int
    compiles: int

    @property
    def line(self) -> str:
        """For people."""
        return (
            f"plan.offload auto: {self.resident} of {self.layers} layers stay on the device;"
            f" {gb_up(self.device_bytes)} GB of a device,"
            f" {gb_up(self.host_bytes)} GB of the host for each"
        )


def fit_layers(
    make_generator: MakeGenerator,
    plan: Plan,
    layers: int,
) -> Fitted:
    """The plan with as many layers on the device as its budget allows, instead of `auto`.

    Compiles the generating step with every layer in host memory and reads its temporaries;
    arguments are known from their shardings. With k layers on the device it needs those of k more
    layers, and no room to fetch into where all are there. That is compiled again to be sure, and
    once more with fewer where it is too large.

    Args:
        make_generator: Of a plan without `auto`; its parameters may be shapes with shardings.
        plan: With budgets where the defaults (97 % of a device's memory, the host's free memory
            less 16 GiB or half of it) do not do.
        layers: Of the model's layer stack.

    Raises:
        PlanError: A budget is too small, larger than what there is, or unknown; the message says
            what would do.
    """
    everything = _Trial(make_generator, plan, layers, 0)
    devices = everything.devices
    budget = device_budget(plan.offload.device_gb, device_memory(devices, None))
    if plan.offload.host_gb is not None:
        host_budget(plan.offload.host_gb, devices, None)  # refused before it is needed
    base = needs = everything.needs()
    if needs.device_bytes > budget:
        raise PlanError(
            f"plan.offload.device_gb: {gb_down(budget)} GB may be used, and a device needs"
            f" {gb_up(needs.device_bytes)} GB to generate even with every layer in host memory;"
            " give that much, use more devices, or ask for fewer tokens, which need less cache"
        )
    measured, compiles, resident = base, 1, 0
    while compiles < MAX_COMPILES:
        resident = needs.most(budget)
        if resident == 0:
            break
        trial = _Trial(make_generator, plan, layers, resident)
        measured, compiles = trial.needs(), compiles + 1
        if measured.device_bytes <= budget:
            break
        needs = needs.corrected(resident, measured)
        measured, resident = base, 0
    if resident < layers:
        given = host_budget(plan.offload.host_gb, devices, None)
        _check_host_bytes(measured.host_bytes, given, budget, base.layer_bytes)
    return Fitted(
        plan=_placed(plan, layers, resident),
        layers=layers,
        resident=resident,
        device_bytes=measured.device_bytes,
        host_bytes=measured.host_bytes,
        compiles=compiles,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Needs:
    """Bytes of a device, and of the host for each, with `resident` of `layers` on the device.

    Attributes:
        layer_bytes: What a layer has that may live in either memory.
        all_fit: False once all layers on the device were seen to be too large.
    """

    layers: int
    device_bytes: int
    host_bytes: int
    layer_bytes: int
    all_fit: bool = True

    def with_resident(self, count: int) -> int:
        """Expected bytes of a device; of a step with no layer on it these are the needs."""
        moved = count * self.layer_bytes
        # Nothing is fetched then, so there is no room to fetch into.
        unused = self.layer_bytes if count == self.layers else 0
        return self.device_bytes + moved - unused

    def most(self, budget: int) -> int:
        """Layers that may stay."""
        if self.all_fit and self.with_resident(self.layers) <= budget:
            return self.layers
        if not self.layer_bytes:
            return self.layers
        room = max(0, budget - self.device_bytes)
        return min(self.layers - 1, room // self.layer_bytes)

    def corrected(self, resident: int, measured: "_Needs") -> "_Needs":
        """As a trial showed them to be."""
        more = max(0, measured.device_bytes - self.with_resident(resident))
        if resident == self.layers:
            # It says nothing of steps that fetch; the next is the last try, so leave some room.
            more = self.layer_bytes // 2
        return dataclasses.replace(self, device_bytes=self.device_bytes + more, all_fit=False)


class _Trial:
    """A generating step with some layers on the device."""

    def __init__(self, make_generator: MakeGenerator, plan: Plan, layers: int, resident: int):
        self.layers = layers
        self.generator = make_generator(_placed(plan, layers, resident))

    @property
    def devices(self) -> list[jax.Device]:
        return list(self.generator.bound.mesh.devices.flat)

    def needs(self) -> _Needs:
        """What it needs as compiled.

        A CPU's compiler counts host memory as the device's, so arguments are counted here. Its
        temporaries hold no stack of layers, because all stacks are arguments.
        """
        stats = self.generator.lowered().compile().memory_analysis()
        results = stats.output_size_in_bytes - stats.alias_size_in_bytes
        device, host = argument_bytes(self.generator.arguments)
        return _Needs(
            layers=self.layers,
            device_bytes=device + results + stats.temp_size_in_bytes,
            host_bytes=host,
            layer_bytes=host // self.layers,
        )


def _placed(plan: Plan, layers: int, resident: int) -> Plan:
    share = (layers - resident) / layers
    return plan.placed({"parameters": share})


def argument_bytes(arguments: Any) -> tuple[int, int]:
    """Of a device, and of the host for it."""
    total = {False: 0, True: 0}
    for leaf in jax.tree.leaves(arguments):
        held = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        total[leaf.sharding.memory_kind == "pinned_host"] += held
    return total[False], total[True]


def _check_host_bytes(host_bytes: int, budget: int, device_bytes: int, layer_bytes: int) -> None:
    """Refuse layers in host memory above its budget."""
    if host_bytes <= budget:
        return
    missing = math.ceil((host_bytes - budget) / layer_bytes) * layer_bytes
    raise PlanError(
        f"plan.offload.host_gb: {gb_down(budget)} GB of the host may be used for each device, and"
        f" {gb_up(host_bytes)} GB stay there when {gb_down(device_bytes)} GB of a device are in"
        f" use; give host_gb {gb_up(host_bytes)}, or device_gb {gb_up(device_bytes + missing)}, or"
        " use more devices"
    )
