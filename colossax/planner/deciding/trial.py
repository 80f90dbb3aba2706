"""A plan's step traced, lowered and, where asked for, compiled: what it needs."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from colossax.aot import Target, compile_program, device_bytes, host_bytes
from colossax.config import HOST_KINDS, STATE_KINDS, Plan
from colossax.layerwise import recording_kept
from colossax.offload import Demand, Kind, Traffic, Way
from colossax.pallas.target import capabilities
from colossax.pallas.target import target as pallas_target
from colossax.sharding import compiler_options
from colossax.step.microbatches import batch_dims, num_microbatches
from colossax.step.offloaded.host_arrays import gradient_bytes, host_bytes_of, state_bytes
from colossax.step.step import Step

MakeStep = Callable[[Plan], Step]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """Bytes that may be used of a device, and of the host for each device."""

    device_bytes: int
    host_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepBytes:
    """What a compiled step needs of a device, and of the host for each device."""

    device: int
    host: int

    def within(self, budget: Budget) -> bool:
        return self.device <= budget.device_bytes and self.host <= budget.host_bytes


def placed_kinds(plan: Plan) -> tuple[str, ...]:
    """What is placed: not activations where segments say which of them go to the host."""
    named = any(segment.placement.named_activations for segment in plan.segments)
    return STATE_KINDS if named else HOST_KINDS


def with_shares(plan: Plan, shares: Mapping[str, float]) -> Plan:
    """With these shares, and layers updated during backward even if all stay on the device."""
    return plan.placed({"fused": True, **shares})


class Trial:
    """A plan's step, traced and lowered but not compiled."""

    def __init__(
        self,
        make_step: MakeStep,
        plan: Plan,
        shapes: Mapping[str, jax.ShapeDtypeStruct],
        target: Target | None,
    ):
        self.shapes = shapes
        self.target = target
        with choosing_for(target):
            self.step = make_step(plan)
            self.batch = self.step.abstract_batch(shapes)
            with recording_kept() as kept:
                self.lowered = self.step.jitted.trace(self.step.abstract, self.batch).lower()
        self.kept_bytes = sum(kept.values())

    @property
    def layers(self) -> int:
        """Of the deepest layer stack."""
        return max(info.total_layers or 0 for info in jax.tree.leaves(self.step.spec.infos))

    @property
    def microbatches(self) -> int:
        dims = batch_dims(self.batch, self.step.options.batch_dims)
        return num_microbatches(self.step.bound, self.batch, dims)

    def compiled(self) -> StepBytes:
        """What the compiler says it needs."""
        if self.target is not None:
            options = compiler_options(self.step.bound)
            stats = compile_program(self.lowered, options=options, target=self.target).stats
        else:
            stats = self.lowered.compile().memory_analysis()
        device, host = device_bytes(stats), host_bytes(stats)
        if self.step.bound.mesh.devices.flat[0].platform == "cpu":
            there = sum(self.host_arrays().values())
            return StepBytes(device=device + host - there, host=there)
        return StepBytes(device=device, host=host)

    def host_arrays(self) -> dict[str, int]:
        """Bytes of a device's arrays in host memory by kind, from their shapes."""
        return {**state_bytes(self.step, self.microbatches), "activations": self.kept_bytes}

    def traffic(self) -> dict[str, Traffic]:
        """Bytes that cross the bus in a step by kind: parameters in every pass, forward or
        backward, and where an update waits for it; the optimizer's state and new parameters in the
        update; gradients each time they are added to (each of several microbatches fetches their
        sums and stores them, but for a last one that updates at once), and where an update waits;
        what layers keep once each way, and where a pass is made again."""
        count, again = self.microbatches, self._clipping == "two_pass"
        waits, several = self._clipping == "stack", self.microbatches > 1
        state = host_bytes_of(self.step.abstract["opt_state"])
        params = host_bytes_of(self.step.abstract["params"])
        gradients, kept = gradient_bytes(self.step, count), self.kept_bytes
        passes, fetched, stored = 2 * count + again, several * count, count - 1 + waits

        def way(passes: int, update: int) -> Way:
            return Way(passes, update) if waits else Way(passes + update)

        return {
            "parameters": Traffic(way(passes * params, waits * params), way(0, params)),
            "optimizer": Traffic(
                way(fetched * gradients, state + waits * gradients),
                way(stored * gradients, state),
            ),
            "activations": Traffic(Way((count + again) * kept), Way(count * kept)),
        }

    def demand(self, needs: StepBytes) -> Demand:
        """What is needed, of a trial with every layer in host memory."""
        arrays, traffic, layers = self.host_arrays(), self.traffic(), self.layers
        kinds = tuple(
            Kind(
                name=name,
                layer_bytes=-(-arrays[name] // layers),
                layer_traffic=traffic[name].times(1 / layers),
            )
            for name in placed_kinds(self.step.bound.plan)
        )
        return Demand(
            layers=layers,
            device_bytes=needs.device,
            host_bytes=needs.host,
            kinds=kinds,
        )

    @property
    def _clipping(self) -> str:
        return "none" if self.step.streaming is None else self.step.streaming.clipping


def choosing_for(target: Target | None) -> contextlib.AbstractContextManager[Any]:
    if target is None:
        return contextlib.nullcontext()
    if target.mixed:
        gpus = [island.gpu for island in target.islands]
        return capabilities({gpu.name: gpu.compute_capability for gpu in gpus})
    return pallas_target("gpu", compute_capability=target.gpu.compute_capability)
