"""Which layers stay on the device, found by compiling: `plan.offload.auto`."""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jaxlib

from colossax.aot import Target, compile_program, device_bytes, host_bytes
from colossax.config import HOST_KINDS, SAVEABLE, OffloadConfig, Plan, cache_folder, to_json
from colossax.errors import PlanError
from colossax.offload import (
    GB,
    Agree,
    Demand,
    Kind,
    Placement,
    device_budget,
    device_memory,
    host_budget,
    host_shares,
    place,
    recording_kept,
)
from colossax.pallas.target import target as pallas_target
from colossax.sharding import compiler_options
from colossax.train.gradients import batch_dims, microbatches
from colossax.train.host_arrays import gradient_bytes, host_bytes_of, state_bytes
from colossax.train.step import Step

MAX_COMPILES = 3

_FORMAT = 1
"""Of what is kept in the cache folder."""

MakeStep = Callable[[Plan], Step]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fitted:
    """A plan whose step is within its budgets.

    Attributes:
        plan: With shares in place of `auto`.
        layers: Of the deepest layer stack.
        resident: Of them on the device, by kind.
        device_bytes: Of a device, as compiled.
        host_bytes: Of the host for each device, as compiled.
        compiles: How many it took; 0 where it was known from before.
    """

    plan: Plan
    layers: int
    resident: Mapping[str, int]
    device_bytes: int
    host_bytes: int
    compiles: int

    @property
    def line(self) -> str:
        """For people."""
        kept = ", ".join(f"{name} of {count}" for name, count in self.resident.items())
        how = f"{self.compiles} compilations" if self.compiles else "cached"
        return (
            f"plan.offload auto: of {self.layers} layers the device keeps {kept};"
            f" {_shown(self.device_bytes)} of a device,"
            f" {_shown(self.host_bytes)} of the host for each ({how})"
        )


def _shown(count: int) -> str:
    return f"{count / GB:.2f} GB" if count >= GB else f"{count / 1e6:.2f} MB"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """Bytes that may be used of a device, and of the host for each device."""

    device_bytes: int
    host_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Bytes:
    """What a compiled step needs of a device, and of the host for each device."""

    device: int
    host: int

    def within(self, budget: Budget) -> bool:
        return self.device <= budget.device_bytes and self.host <= budget.host_bytes


def fit_offload(
    make_step: MakeStep,
    plan: Plan,
    shapes: Mapping[str, Any],
    *,
    target: Target | None = None,
    agree: Agree = lambda make: make(),
) -> Fitted:
    """The plan with as many layers on the device as its budgets allow, instead of `auto`.

    Compiles the step with every layer in host memory, reads its bytes, chooses with
    `offload.place`, compiles again and verifies; a choice that turns out too large is corrected
    and compiled a third time. What it returns was compiled within both budgets. The result is
    kept in the cache folder under a hash of the traced program, budgets, devices and versions.

    On GPUs, there or not, the compiler says what lies where. On CPUs it counts host memory as the
    device's: there arrays in host memory are taken off by formula (arguments by their shardings,
    what layers keep for backward and stacks of gradients by their shapes).

    Args:
        make_step: A plan's step, such as `lambda plan: build_step(make_model, optimizer, loss,
            plan)`.
        plan: With `offload.auto`, and budgets where the defaults (93 % of a device's memory, the
            host's free memory less 16 GiB or half of it) do not do.
        shapes: A global batch, or the shapes of its arrays.
        target: GPUs to compile for that are not there; `make_step` uses their devices.
        agree: With several processes, `Group.from_first`.

    Raises:
        PlanError: A budget is too small, larger than what there is, or unknown; the message says
            what would do.

    Cost: two compilations, at most three; none where the result is known from before.
    """
    _check_findable(plan)
    shapes = jax.eval_shape(lambda batch: batch, dict(shapes))
    everything = _with_shares(plan, dict.fromkeys(_kinds(plan), 1.0))
    trial = _Trial(make_step, everything, shapes, target)
    budget = _budget(plan.offload, trial.step, target)
    entry = cache_folder() / "offload" / f"{_key(plan, trial, budget, target)}.json"
    known = agree(lambda: _known(entry, trial.layers, budget))
    if known is not None:
        return _fitted(plan, known, compiles=0)
    found = _search(make_step, plan, trial, budget)
    _keep(entry, found)
    return found


def _check_findable(plan: Plan) -> None:
    if not plan.offload.auto:
        raise PlanError(
            "plan.offload: 'auto' is off, so there is nothing to find; set auto=True, or build the"
            " step with the plan as it is"
        )
    for segment in plan.segments:
        named = segment.host.intersection(HOST_KINDS)
        if named:
            raise PlanError(
                f"plan.segments.offload: names '{min(named)}', and plan.offload 'auto' decides"
                " where that lives; drop one of them"
            )


def _kinds(plan: Plan) -> tuple[str, ...]:
    """What is placed: not activations where segments say which of them go to the host."""
    named = any(segment.host.intersection(("input", *SAVEABLE)) for segment in plan.segments)
    return HOST_KINDS[:2] if named else HOST_KINDS


def _with_shares(plan: Plan, shares: Mapping[str, float]) -> Plan:
    """With these shares, and layers updated during backward even if all stay on the device."""
    return plan.placed({"fused": True, **shares})


class _Trial:
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
        with _choosing_for(target):
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
        return microbatches(self.step.bound, self.batch, dims)

    def compiled(self) -> _Bytes:
        """What the compiler says it needs."""
        if self.target is not None:
            options = compiler_options(self.step.bound)
            stats = compile_program(self.lowered, options=options).stats
        else:
            stats = self.lowered.compile().memory_analysis()
        device, host = device_bytes(stats), host_bytes(stats)
        if self.step.bound.mesh.devices.flat[0].platform == "cpu":
            there = sum(self.host_arrays().values())
            return _Bytes(device=device + host - there, host=there)
        return _Bytes(device=device, host=host)

    def host_arrays(self) -> dict[str, int]:
        """Bytes of a device's arrays in host memory by kind, from their shapes."""
        return {**state_bytes(self.step, self.microbatches), "activations": self.kept_bytes}

    def traffic(self) -> dict[str, int]:
        """Bytes that cross the bus in a step by kind: parameters and what backward keeps in every
        pass, forward or backward, the optimizer's state once each way, and gradients each time they
        are added to."""
        passes = 2 * self.microbatches + (self._clipping == "two_pass")
        visits = passes + 1 + (self._clipping == "stack")
        state = host_bytes_of(self.step.abstract["opt_state"])
        gradients = gradient_bytes(self.step, self.microbatches)
        return {
            "parameters": visits * host_bytes_of(self.step.abstract["params"]),
            "optimizer": 2 * state + 2 * self.microbatches * gradients,
            "activations": passes * self.kept_bytes,
        }

    def demand(self, found: _Bytes) -> Demand:
        """What is needed, of a trial with every layer in host memory."""
        arrays, traffic, layers = self.host_arrays(), self.traffic(), self.layers
        kinds = tuple(
            Kind(
                name=name,
                layer_bytes=-(-arrays[name] // layers),
                layer_traffic=traffic[name] // layers,
            )
            for name in _kinds(self.step.bound.plan)
        )
        return Demand(
            layers=layers,
            device_bytes=found.device,
            host_bytes=found.host,
            kinds=kinds,
        )

    @property
    def _clipping(self) -> str:
        return "none" if self.step.streaming is None else self.step.streaming.clipping


def _choosing_for(target: Target | None) -> contextlib.AbstractContextManager[Any]:
    if target is None:
        return contextlib.nullcontext()
    return pallas_target("gpu", compute_capability=target.gpu.compute_capability)


def _search(make_step: MakeStep, plan: Plan, everything: _Trial, budget: Budget) -> Fitted:
    """Choose, compile, correct; where nothing else does, every layer on the host, if that fits."""
    base = everything.compiled()
    demand = everything.demand(base)
    compiles, chosen = 1, _choose(demand, budget)
    while chosen is not None and any(chosen.resident.values()) and compiles < MAX_COMPILES:
        moved = _with_shares(plan, chosen.shares)
        found = _Trial(make_step, moved, everything.shapes, everything.target).compiled()
        compiles += 1
        if found.within(budget):
            return _fitted(plan, _record(chosen, found), compiles=compiles)
        demand = _corrected(demand, chosen, found)
        chosen = _choose(demand, budget, again=True)
    if base.within(budget):
        nothing = demand.placed(dict.fromkeys(demand.names, 0))
        return _fitted(plan, _record(nothing, base), compiles=compiles)
    raise PlanError(
        f"plan.offload: of {demand.layers} layers as many as have to stay on the device take more"
        f" of it, compiled, than {budget.device_bytes / GB:.3f} GB; give"
        f" host_gb {math.ceil(base.host / GB * 1000) / 1000:.3f}, with which every layer can live"
        " in host memory, or more of the device (device_gb)"
    )


def _choose(demand: Demand, budget: Budget, *, again: bool = False) -> Placement | None:
    """The best placement; a second time None where there is none.

    Raises:
        PlanError: The first time there is none.
    """
    try:
        return place(demand, device_bytes=budget.device_bytes, host_bytes=budget.host_bytes)
    except PlanError:
        if not again:
            raise
        return None


def _corrected(demand: Demand, chosen: Placement, found: _Bytes) -> Demand:
    """The demand as this placement showed it to be."""
    return dataclasses.replace(
        demand,
        device_bytes=demand.device_bytes + max(0, found.device - chosen.device_bytes),
        host_bytes=demand.host_bytes + max(0, found.host - chosen.host_bytes),
    )


def _record(chosen: Placement, found: _Bytes) -> dict[str, Any]:
    """What is kept of a result, as JSON."""
    return {
        "format": _FORMAT,
        "layers": chosen.layers,
        "resident": dict(chosen.resident),
        "device_bytes": found.device,
        "host_bytes": found.host,
    }


def _fitted(plan: Plan, record: Mapping[str, Any], *, compiles: int) -> Fitted:
    layers = record["layers"]
    return Fitted(
        plan=_with_shares(plan, host_shares(record["resident"], layers)),
        layers=layers,
        resident=record["resident"],
        device_bytes=record["device_bytes"],
        host_bytes=record["host_bytes"],
        compiles=compiles,
    )


# Budgets


def _budget(wanted: OffloadConfig, step: Step, target: Target | None) -> Budget:
    """What may be used; refused here if it is not there."""
    devices = list(step.bound.mesh.devices.flat)
    return Budget(
        device_bytes=device_budget(wanted.device_gb, device_memory(devices, target)),
        host_bytes=host_budget(wanted.host_gb, devices, target),
    )


# Results known from before


def _key(plan: Plan, trial: _Trial, budget: Budget, target: Target | None) -> str:
    """Hash of all that decides a result.

    The program with every layer on the host stands for model, loss, optimizer, batch and clipping:
    a change of any that moves a byte shows in it. Free host memory does not count, it is different
    every time.
    """
    placeless = _with_shares(plan, dict.fromkeys(HOST_KINDS, 0.0))
    unbudgeted = dataclasses.replace(placeless.offload, host_gb=None)
    device = trial.step.bound.mesh.devices.flat[0]
    facts = {
        "program": trial.lowered.as_text(),
        "plan": to_json(placeless.replace(offload=unbudgeted)),
        "options": compiler_options(trial.step.bound),
        "devices": target.name if target is not None else device.device_kind,
        "memory": device_memory(list(trial.step.bound.mesh.devices.flat), target),
        "device_bytes": budget.device_bytes,
        "versions": [_FORMAT, jax.__version__, jaxlib.__version__],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _known(entry: Path, layers: int, budget: Budget) -> dict[str, Any] | None:
    """What was kept, if it is whole and within the budgets."""
    try:
        record = json.loads(entry.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if _is_whole(record, layers) and _bytes_of(record).within(budget) else None


def _is_whole(record: Any, layers: int) -> bool:
    if not isinstance(record, dict) or record.get("format") != _FORMAT:
        return False
    counts = record.get("resident")
    numbers = [record.get("layers"), record.get("device_bytes"), record.get("host_bytes")]
    return (
        isinstance(counts, dict)
        and set(HOST_KINDS[:2]) <= set(counts) <= set(HOST_KINDS)
        and all(type(number) is int for number in [*numbers, *counts.values()])
        and record["layers"] == layers
        and all(0 <= count <= layers for count in counts.values())
    )


def _bytes_of(record: Mapping[str, Any]) -> _Bytes:
    return _Bytes(device=record["device_bytes"], host=record["host_bytes"])


def _keep(entry: Path, found: Fitted) -> None:
    """Write a result whole or not at all; without room for it the next run looks again."""
    record = {
        "format": _FORMAT,
        "layers": found.layers,
        "resident": dict(found.resident),
        "device_bytes": found.device_bytes,
        "host_bytes": found.host_bytes,
    }
    part = entry.with_suffix(f".{os.getpid()}.part")
    with contextlib.suppress(OSError):
        entry.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(record), encoding="utf-8")
        os.replace(part, entry)
