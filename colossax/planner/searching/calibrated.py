"""Rates that `colossax bench links` measured, in the place of those that are assumed."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from colossax.aot import Link, Target
from colossax.config import Plan, user_path
from colossax.errors import InputError, PlanError
from colossax.pipeline.measured import LinkTimes, read_link_times
from colossax.planner.searching.seconds import Rates, rates_of

_MEASURED = "measured"
"""Name of links that were."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibrated:
    """What seconds are counted by.

    Attributes:
        rates: Of devices and links.
        line: Which of them were measured, for people.
    """

    rates: Rates
    line: str


def calibrated_by(
    name: str | Path | None, target: Target, plan: Plan, option: str = "--rates"
) -> Calibrated | None:
    """Rates of a target as a file of `bench links` has them; `option` asked for it. None without.

    Raises:
        InputError: There is no such file, or it is damaged.
        PlanError: See `calibrated`.
    """
    if name is None:
        return None
    path = user_path(name, option)
    times = read_link_times(path)
    if times is None:
        raise InputError(
            f"{option} {path}: there is no such file; write it on the GPUs with colossax bench"
            f" links RECIPE --out {path}"
        )
    return calibrated(times, target, plan, f"{option} {path}")


def calibrated(times: LinkTimes, target: Target, plan: Plan, where: str) -> Calibrated:
    """Rates of a target, measured where they were and else assumed.

    Devices were of one node, so links between nodes stay assumed. What a matmul takes was measured
    in one dtype; plans in another keep what is assumed.

    Args:
        times: Of devices of the target's kind.
        target: Of one island.
        plan: In what it multiplies.
        where: For people.

    Raises:
        PlanError: The target is made of islands, or its GPUs are others than were measured.
    """
    if target.mixed:
        raise PlanError(
            f"{where}: rates are those of one kind of GPU, and target '{target.name}' is made of"
            " islands; leave it out, or give one of the islands"
        )
    kinds = {times.device_kind, times.other_kind}
    if not all(is_called(target.gpu.name, kind) for kind in kinds):
        raise PlanError(
            f"{where}: was measured on {' and '.join(sorted(kinds))}, and target '{target.name}' is"
            f" of {target.gpu.name}; measure there with colossax bench links {times.recipe}, or"
            " give another target"
        )
    rates, known = rates_of(target, plan), list[str]()
    if times.collectives:
        within = {
            one.kind: Link(name=_MEASURED, latency_s=one.latency_s, bytes_per_s=one.bytes_per_s)
            for one in times.collectives
        }
        first = within[times.collectives[0].kind]
        rates = dataclasses.replace(rates, node=first, within=within)
        known.append(f"{', '.join(within)} within a node of {times.collectives[0].devices}")
    else:
        rate = times.link.bytes_per_s
        assert rate is not None
        node = Link(name=_MEASURED, latency_s=0.0, bytes_per_s=rate)
        rates = dataclasses.replace(rates, node=node)
        known.append("links within a node")
    alone = times.device
    if alone is not None:
        rates = dataclasses.replace(rates, memory=alone.bytes_per_s)
        known.append("updates, as a copy")
        if alone.dtype == plan.precision.multiplies_in:
            rates = dataclasses.replace(rates, matmuls=alone.flops_per_s)
            known.append(f"matmuls in {alone.dtype}")
    return Calibrated(rates=rates, line=_line(where, known, target))


def _line(where: str, known: list[str], target: Target) -> str:
    left = ["attention between tokens"]
    left += ["matmuls"] * (not any(one.startswith("matmuls") for one in known))
    left += ["updates"] * (not any(one.startswith("updates") for one in known))
    left += ["links between nodes"] * (target.nodes > 1)
    left.append("what is hidden beside compute")
    return f"{where}: measured are {'; '.join(known)}; assumed are {'; '.join(left)}"


def is_called(name: str, kind: str) -> bool:
    """Whether a driver's name for a GPU is that of a data sheet, which may say more behind it."""
    return name == kind or name.startswith(f"{kind} ")


def ratio(one: Mapping[str, Any], sizes: Mapping[str, int], target: Target, rates: Rates) -> float:
    """By how much a collective of a compiled program takes longer than by data sheets.

    Args:
        one: As `Inspection.to_json` tells it.
        sizes: Of the plan's mesh axes.
        target: Of one island.
        rates: That were measured.
    """
    axes = one["axis"].split(" x ")
    if not one["seconds"] or any(axis not in sizes for axis in axes):
        return 1.0
    link = rates.kinds.get(one["kind"])
    if link is None and one["link"] == target.gpu.nvlink.name:
        link = rates.within.get(one["kind"], rates.node)
    link = rates.network if link is None else link
    group = math.prod(sizes[axis] for axis in axes)
    found = target.ring_seconds(one["ring_bytes"], group, one["count"], link, one["kind"])
    return found / one["seconds"]
