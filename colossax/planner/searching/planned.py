"""The best plans of a run on a target: searched by formula, compiled, in their true order."""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from colossax.aot import Target, target_devices
from colossax.config import MeshAxis, Plan, to_json
from colossax.errors import PlanError
from colossax.planner.counting.compiled import check_cudnn, check_shapes
from colossax.planner.profiling import ModelProfile, profile_task
from colossax.planner.searching.asked import NOTHING_ASKED, Asked
from colossax.planner.searching.calibrated import Calibrated, ratio
from colossax.planner.searching.given_tiers import Tiers, check_host, no_file, tiers_of
from colossax.planner.searching.island_layouts import IslandCandidate
from colossax.planner.searching.refusing import enough, nothing
from colossax.planner.searching.search import (
    Candidate,
    again,
    search,
)
from colossax.planner.searching.seconds import Rates, Seconds
from colossax.planner.searching.smallest import smallest_target, smallest_tiers
from colossax.planner.searching.verifying import (
    Compiled,
    Subject,
    Tell,
    compiled,
    room_of,
    true_seconds,
)
from colossax.planner.searching.words import why_slower

_GIB = 2**30
_TRIED = 6
"""Candidates for each plan that is to be named, of which those that fit are named."""

_NEAR = 1.1
"""Times the budget that the smallest may take by formula, and is compiled all the same."""

_WORTH = 0.02
"""Share of the budget that is left over, above which a layer's policy is chosen anew by it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planned:
    """One plan, and what is known of it.

    Attributes:
        candidate: What formulas say of it.
        seconds: Of a step, with collectives as they were compiled.
        found: What the compiled program says; None where it was not compiled.
        why_not_first: Against the first; empty for that.
        by_leave: What of it changes values, as options of `train`; nothing unless it was allowed.
    """

    candidate: Candidate | IslandCandidate
    seconds: Seconds
    found: Compiled | None
    why_not_first: str = ""
    by_leave: tuple[str, ...] = ()

    @property
    def plan(self) -> Plan:
        """It."""
        return self.candidate.plan

    @property
    def total_bytes(self) -> float:
        """Of a device: compiled, else predicted."""
        if self.found is None:
            return self.candidate.predicted.bytes.total
        return float(self.found["device_bytes"]["total"])

    @property
    def host_bytes(self) -> float:
        """Of the host, for each device: compiled, else predicted."""
        predicted = self.candidate.predicted
        if self.found is None:
            return predicted.host + predicted.through
        return float(_host_bytes(self.candidate, self.found))

    @property
    def disk_bytes(self) -> float:
        """Of the file that layers' optimizer state lies in, for each device: by formula."""
        return self.candidate.predicted.file

    @property
    def collectives(self) -> list[dict[str, Any]]:
        """What a device sends in a step by kind and mesh axes, `ring_bytes` of it: compiled, else
        predicted."""
        if self.found is not None:
            return self.found["collectives"]
        return [
            {
                "axis": " x ".join(one.axes),
                "kind": one.kind,
                "count": one.times,
                "ring_bytes": one.bytes,
            }
            for one in self.candidate.predicted.sent_in_a_step
        ]

    def to_json(self) -> dict[str, Any]:
        """As plain JSON types."""
        bytes_found = None if self.found is None else self.found["device_bytes"]
        predicted = self.candidate.predicted
        return {
            "label": self.candidate.label,
            "plan": to_json(self.plan),
            "seconds": self.seconds.total,
            "seconds_by_term": self.seconds.terms,
            "seconds_beside": self.seconds.beside,
            "device_bytes": bytes_found or {"total": predicted.bytes.total},
            "predicted_bytes": dataclasses.asdict(predicted.bytes),
            "host_bytes": self.host_bytes,
            **({"disk_bytes": self.disk_bytes} if self.disk_bytes else {}),
            "collectives": self.collectives,
            "fits": True,  # by formula where it is not verified
            "verified": self.found is not None,
            "why_not_first": self.why_not_first,
            "by_leave": list(self.by_leave),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What planning came to.

    Attributes:
        plans: The fastest first; all fit.
        scored: How many were scored by formula.
        compiled: How many programs were compiled, those of earlier searches left out.
        room: Bytes of a device that a plan might take.
        rates: What was measured of what seconds are counted by; empty where nothing was.
    """

    plans: tuple[Planned, ...]
    scored: int
    compiled: int
    room: float
    rates: str = ""

    @property
    def best(self) -> Plan:
        """The fastest."""
        return self.plans[0].plan


def plan_run(
    subject: Subject,
    plan: Plan,
    target: Target,
    *,
    asked: Asked = NOTHING_ASKED,
    top: int = 3,
    verify: bool = True,
    device_gb: float | None = None,
    host_gb: float | None = None,
    disk_gb: float | None = None,
    processes: int | None = None,
    rates: Calibrated | None = None,
    tell: Tell = lambda _: None,
) -> Answer:
    """The fastest plans that fit a target.

    Every mesh, microbatch and mix of policies is scored by formula; the fastest of the best meshes
    are compiled. Where a program leaves room, or is over it, the layers' policies are chosen anew
    by what it said, and compiled again. No plan that was compiled and is over its budget is named.

    Args:
        subject: What is trained; its global batch and length of rows stay.
        plan: Precision, kernels and all that is not searched.
        target: Of one island, or of several, which stages alone cross.
        asked: What is given or ruled out.
        top: How many to name.
        verify: Whether they are compiled; else formulas alone speak.
        device_gb: Budget of a device in 1e9 bytes; default what a step may take of its memory.
        host_gb: Likewise of the host for each device, where layers' arrays may live there; default
            none of it.
        disk_gb: Likewise of a file in which layers' optimizer state may lie, beside `host_gb`;
            default none.
        processes: That compile at once; default the processors here.
        rates: That were measured; default what is assumed of the target.
        tell: Called with lines of progress.

    Raises:
        PlanError: Nothing fits, with what needs least; no mesh divides the model and its batch; on
            several islands layers are not of one kind; the plan has what is not searched and would
            be lost; layers' arrays cannot live in host memory.
        InputError: Nothing can be compiled here; what is asked for names no dim.
    """
    check_shapes(subject.task)
    check_host(plan, host_gb, disk_gb)
    if asked.allowed:
        from colossax.planner.searching.allowing import plan_allowed

        given = {"verify": verify, "device_gb": device_gb, "processes": processes, "rates": rates}
        given = {**given, "host_gb": host_gb, "disk_gb": disk_gb}
        whole = {**given, "asked": asked, "top": top, "tell": tell}
        return plan_allowed(plan_run, subject, plan, target, **whole)
    if target.mixed:
        from colossax.planner.searching.islands_planned import plan_islands

        if host_gb is not None:
            raise PlanError(
                f"plan: host memory is not searched for several islands, as of {target.name}; leave"
                " --host-gb out, or give one kind of node"
            )
        given = {"verify": verify, "device_gb": device_gb, "processes": processes, "tell": tell}
        return plan_islands(subject, plan, target, asked=asked, top=top, **given)
    room = room_of(target, device_gb)
    if verify:
        target_devices(target)  # refused at once where nothing can be compiled
        check_cudnn(plan, target)
    profile = profile_task(subject.task, plan, target)
    asked.check(profile)
    tiers = tiers_of(subject, profile, plan, target, host_gb, disk_gb)
    known = None if rates is None else rates.rates
    measured = "" if rates is None else rates.line
    searched = functools.partial(
        search, profile, plan, target, room=room, count=_TRIED * top, rates=known, **tiers
    )
    found = searched(asked=asked)
    tell(
        f"{found.scored} plans on {target.size} x {target.gpu.name} scored, those that might be"
        f" fastest; {len(found.candidates)} meshes fit"
    )

    def would_do(sizes: Sequence[tuple[str, float, float]] = ()) -> str:
        tell("looking for what would do")
        short = max(0.0, min((off for *_, off in sizes), default=0.0))
        larger = smallest_target(profile, plan, target, room=room - short, asked=asked)
        beside = None if no_file(subject, profile, plan, target) else tiers["host"]
        given = {"room": room, "asked": asked, "beside": beside}
        more = [] if found.candidates else smallest_tiers(profile, plan, target, **given)
        least = min(sizes, key=lambda one: one[1], default=None)
        return enough(found, room, target, larger, more, least)

    if not verify:
        if not found.candidates:
            raise PlanError(nothing(found, room, target) + would_do())
        plans = [
            Planned(candidate=one, seconds=one.predicted.seconds, found=None)
            for one in found.candidates[:top]
        ]
        return answer_of(plans, found.scored, 0, room, measured)
    workers = processes or min(os.cpu_count() or 1, 8)
    proving = _Proving(subject, profile, target, room, tiers, workers, tell, known)
    waiting = list(found.candidates)
    least = found.smallest
    if not waiting and least is not None and least.predicted.bytes.total < _NEAR * room:
        waiting = [least]  # formulas err: what is near the budget is compiled before it is refused
    while waiting and len(proving.proved) < top and proving.tried < _TRIED * top:
        count = top - len(proving.proved)
        proving.take(waiting[:count])
        waiting = waiting[count:]
        if proving.unstaged and MeshAxis.STAGE not in asked.pinned:
            asked = asked.without(MeshAxis.STAGE)
            found = searched(asked=asked)
            waiting = [one for one in found.candidates if one.plan not in proving.seen]
    if waiting and proving.compiled and not proving.proved:  # that which needs least has its turn
        proving.take([min(waiting, key=lambda one: one.predicted.bytes.total)])
    if not proving.proved:
        raise PlanError(nothing(found, room, target, proving.seen_words) + would_do(proving.sizes))
    plans = sorted(proving.proved, key=lambda one: one.seconds.total)
    return answer_of(plans, found.scored, proving.compiled, room, measured)


class _Proving:
    """Candidates compiled, and policies chosen anew by what that said."""

    def __init__(
        self,
        subject: Subject,
        profile: ModelProfile,
        target: Target,
        room: float,
        tiers: Tiers,
        workers: int,
        tell: Tell,
        rates: Rates | None = None,
    ):
        self._subject, self._profile, self._target = subject, profile, target
        self._rates = rates
        self._room, self._workers, self._tell = room, workers, tell
        self._tiers, self._host = tiers, tiers["host"]
        self.proved: list[Planned] = []
        self.compiled = self.tried = 0
        self.unstaged = False
        self.seen: list[Plan] = []
        self.refusal = ""
        self.sizes: list[tuple[str, float, float]] = []
        """Of programs: whose, what they take, and what of it formulas leave out."""

    def take(self, candidates: list[Candidate]) -> None:
        """Prove these; what fits joins `proved`."""
        first = self._compiled(candidates)
        second: list[tuple[Candidate, Planned | None]] = []
        for one, found in zip(candidates, first, strict=True):
            if "refused" in found:
                self._tell(f"{one.label}: refused, {found['refused']}")
                # What is wrong with a model's layers, or its loss, is so on any number of stages.
                self.unstaged |= found["refused"].startswith("mesh axis 'stage'")
                continue
            planned = self._planned(one, found)
            changed = self._again(one, found)
            if changed is not None:
                second.append((changed, planned))
            elif planned is not None:
                self.proved.append(planned)
        for (one, before), found in zip(
            second, self._compiled([one for one, _ in second]), strict=True
        ):
            after = None if "refused" in found else self._planned(one, found)
            both = [planned for planned in (before, after) if planned is not None]
            if both:
                self.proved.append(min(both, key=lambda planned: planned.seconds.total))

    @property
    def seen_words(self) -> str:
        """What was tried, for people; empty where nothing was."""
        if not self.tried:
            return ""
        last = f", the last refusal: {self.refusal}" if self.refusal else ""
        return f"; {self.tried} were tried and {self.compiled} compiled{last}"

    def _compiled(self, candidates: list[Candidate]) -> list[Compiled]:
        if candidates:
            self._tell(f"compiling {'; '.join(one.label for one in candidates)}")
        plans = [one.plan for one in candidates]
        found = compiled(self._subject, plans, self._target, self._workers)
        now = [one for one in found if not one.get("kept")]
        self.compiled += sum("refused" not in one for one in now)
        if len(now) < len(found):
            self._tell(f"{len(found) - len(now)} of them were compiled before, and are not again")
        self.tried += len(found)
        self.seen += plans
        refusals = [one["refused"] for one in found if "refused" in one]
        self.refusal = refusals[-1] if refusals else self.refusal
        return found

    def _planned(self, one: Candidate, found: Compiled) -> Planned | None:
        total, there = found["device_bytes"]["total"], _host_bytes(one, found)
        self.sizes.append((one.label, total, total - one.predicted.bytes.total))
        fits = total <= self._room and there <= (self._host or math.inf)
        self._tell(
            f"{one.label}: {total / _GIB:.2f} GiB compiled"
            f" ({one.predicted.bytes.total / _GIB:.2f} by formula)"
            f"{f', {there / _GIB:.2f} GiB of the host' if there else ''},"
            f" {'fits' if fits else 'is over the budget'}"
        )
        if not fits:
            return None
        slower = self._slower(one.plan)
        seconds = true_seconds(one.predicted.seconds, found, self._target, slower)
        return Planned(candidate=one, seconds=seconds, found=found)

    def _slower(self, plan: Plan) -> Callable[[Mapping[str, Any]], float]:
        if self._rates is None:
            return lambda _: 1.0
        sizes = plan.mesh_sizes(self._target.size)
        return functools.partial(ratio, sizes=sizes, target=self._target, rates=self._rates)

    def _again(self, one: Candidate, found: Compiled) -> Candidate | None:
        """The same mesh by what its program said; None where that changes nothing."""
        off = found["device_bytes"]["total"] - one.predicted.bytes.total
        left = self._room - found["device_bytes"]["total"]
        there, said = _host_bytes(one, found), one.predicted.host + one.predicted.through
        if 0 <= left < _WORTH * self._room and there <= (self._host or math.inf):
            return None
        host = None if self._host is None else self._host - max(0.0, there - said)
        budgets = {"room": self._room - off, "host": host}
        disk, rates = self._tiers["disk"], self._rates
        changed = again(self._profile, one, self._target, rates=rates, disk=disk, **budgets)
        return None if changed is None or changed.plan == one.plan else changed


def _host_bytes(one: Candidate | IslandCandidate, found: Compiled) -> float:
    """Of the host, for each device: the program's, and what records of a file go through."""
    return found["host_bytes"] + one.predicted.through


def answer_of(plans: list[Planned], scored: int, count: int, room: float, rates: str) -> Answer:
    """Plans, the fastest first, with what makes the others slower; see `Answer`."""
    first = plans[0].seconds
    plans_told = [
        one if at == 0 else dataclasses.replace(one, why_not_first=why_slower(one.seconds, first))
        for at, one in enumerate(plans)
    ]
    return Answer(plans=tuple(plans_told), scored=scored, compiled=count, room=room, rates=rates)
