"""Which layers stay on the device, found by compiling: `plan.offload.auto`."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax

from colossax.aot import Target
from colossax.config import OffloadConfig, Plan, cache_folder
from colossax.errors import PlanError
from colossax.offload import (
    GB,
    Agree,
    Demand,
    Residency,
    device_budget,
    device_memory,
    host_budget,
    host_shares,
    place,
)
from colossax.planner.deciding.known_fits import fit_key, keep_fit, known_fit
from colossax.planner.deciding.trial import (
    Budget,
    MakeStep,
    StepBytes,
    Trial,
    placed_kinds,
    with_shares,
)
from colossax.step.step import Step

MAX_COMPILES = 3


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
        plan: With `offload.auto`, and budgets where the defaults (97 % of a device's memory, the
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
    everything = with_shares(plan, dict.fromkeys(placed_kinds(plan), 1.0))
    trial = Trial(make_step, everything, shapes, target)
    budget = _budget(plan.offload, trial.step, target)
    entry = cache_folder() / "offload" / f"{fit_key(plan, trial, budget, target)}.json"
    known = agree(lambda: known_fit(entry, trial.layers, budget))
    if known is not None:
        return _fitted(plan, known, compiles=0)
    record, compiles = _search(make_step, plan, trial, budget)
    keep_fit(entry, record)
    return _fitted(plan, record, compiles=compiles)


def _check_findable(plan: Plan) -> None:
    if not plan.offload.auto:
        raise PlanError(
            "plan.offload: 'auto' is off, so there is nothing to find; set auto=True, or build the"
            " step with the plan as it is"
        )
    for segment in plan.segments:
        named = segment.placement.kinds
        if named:
            raise PlanError(
                f"plan.segments.offload: names '{min(named)}', and plan.offload 'auto' decides"
                " where that lives; drop one of them"
            )


def _search(
    make_step: MakeStep, plan: Plan, everything: Trial, budget: Budget
) -> tuple[dict[str, Any], int]:
    """Choose, compile, correct; where nothing else does, every layer on the host, if that fits."""
    base = everything.compiled()
    demand = everything.demand(base)
    compiles, chosen = 1, _choose(demand, budget)
    while chosen is not None and any(chosen.resident.values()) and compiles < MAX_COMPILES:
        moved = with_shares(plan, chosen.shares)
        needs = Trial(make_step, moved, everything.shapes, everything.target).compiled()
        compiles += 1
        if needs.within(budget):
            return _record(chosen, needs), compiles
        demand = _corrected(demand, chosen, needs)
        chosen = _choose(demand, budget, again=True)
    if base.within(budget):
        nothing = demand.placed(dict.fromkeys(demand.names, 0))
        return _record(nothing, base), compiles
    raise PlanError(
        f"plan.offload: of {demand.layers} layers as many as have to stay on the device take more"
        f" of it, compiled, than {budget.device_bytes / GB:.3f} GB; give"
        f" host_gb {math.ceil(base.host / GB * 1000) / 1000:.3f}, with which every layer can live"
        " in host memory, or more of the device (device_gb)"
    )


def _choose(demand: Demand, budget: Budget, *, again: bool = False) -> Residency | None:
    """The best there is; a second time None where there is none.

    Raises:
        PlanError: The first time there is none.
    """
    try:
        return place(demand, device_bytes=budget.device_bytes, host_bytes=budget.host_bytes)
    except PlanError:
        if not again:
            raise
        return None


def _corrected(demand: Demand, chosen: Residency, needs: StepBytes) -> Demand:
    """The demand as compiling this choice showed it to be."""
    return dataclasses.replace(
        demand,
        device_bytes=demand.device_bytes + max(0, needs.device - chosen.device_bytes),
        host_bytes=demand.host_bytes + max(0, needs.host - chosen.host_bytes),
    )


def _record(chosen: Residency, needs: StepBytes) -> dict[str, Any]:
    """What is kept of a result, as JSON."""
    return {
        "layers": chosen.layers,
        "resident": dict(chosen.resident),
        "device_bytes": needs.device,
        "host_bytes": needs.host,
    }


def _fitted(plan: Plan, record: Mapping[str, Any], *, compiles: int) -> Fitted:
    layers = record["layers"]
    return Fitted(
        plan=with_shares(plan, host_shares(record["resident"], layers)),
        layers=layers,
        resident=record["resident"],
        device_bytes=record["device_bytes"],
        host_bytes=record["host_bytes"],
        compiles=compiles,
    )


def _budget(wanted: OffloadConfig, step: Step, target: Target | None) -> Budget:
    """What may be used; refused here if it is not there."""
    devices = list(step.bound.mesh.devices.flat)
    return Budget(
        device_bytes=device_budget(wanted.device_gb, device_memory(devices, target)),
        host_bytes=host_budget(wanted.host_gb, devices, target),
    )
