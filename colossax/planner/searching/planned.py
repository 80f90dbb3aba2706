"""The best plans of a run on a target: searched by formula, compiled, in their true order."""

import dataclasses
import os
from typing import Any

from colossax.aot import Target
from colossax.config import Plan, to_json
from colossax.errors import PlanError
from colossax.planner.counting.islands import check_one_island
from colossax.planner.profiling import ModelProfile, profile_task
from colossax.planner.searching.search import (
    NOTHING_ASKED,
    Asked,
    Candidate,
    Found,
    again,
    search,
    told,
)
from colossax.planner.searching.seconds import Seconds
from colossax.planner.searching.verifying import (
    Compiled,
    Subject,
    Tell,
    compiled,
    room_of,
    true_seconds,
)

_GIB = 2**30
_WORTH = 0.02
"""Share of the budget that is left over, above which a layer's policy is chosen anew by it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planned:
    """One plan, proved.

    Attributes:
        candidate: What formulas say of it.
        seconds: Of a step, with collectives as they were compiled.
        found: What the compiled program says; None where it was not compiled.
        why_not_first: Against the first; empty for that.
    """

    candidate: Candidate
    seconds: Seconds
    found: Compiled | None
    why_not_first: str = ""

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

    def to_json(self) -> dict[str, Any]:
        """As plain JSON types."""
        bytes_found = None if self.found is None else self.found["device_bytes"]
        predicted = self.candidate.predicted
        return {
            "label": self.candidate.label,
            "plan": to_json(self.plan),
            "seconds": self.seconds.total,
            "seconds_by_term": dataclasses.asdict(self.seconds),
            "device_bytes": bytes_found or {"total": predicted.bytes.total},
            "predicted_bytes": dataclasses.asdict(predicted.bytes),
            "collectives": [] if self.found is None else self.found["collectives"],
            "fits": True,
            "verified": self.found is not None,
            "why_not_first": self.why_not_first,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What planning came to.

    Attributes:
        plans: The fastest first; all fit.
        scored: How many were scored by formula.
        compiled: How many programs were compiled.
        room: Bytes of a device that a plan might take.
    """

    plans: tuple[Planned, ...]
    scored: int
    compiled: int
    room: float


def plan_run(
    subject: Subject,
    plan: Plan,
    target: Target,
    *,
    asked: Asked = NOTHING_ASKED,
    top: int = 3,
    verify: bool = True,
    device_gb: float | None = None,
    processes: int | None = None,
    tell: Tell = lambda _: None,
) -> Answer:
    """The fastest plans that fit a target.

    Every mesh, microbatch and mix of policies is scored by formula; the fastest of the best meshes
    are compiled. Where a program leaves room, or is over it, the layers' policies are chosen anew
    by what it said, and compiled again. No plan that was compiled and is over its budget is named.

    Args:
        subject: What is trained; its global batch and length of rows stay.
        plan: Precision, kernels and all that is not searched.
        target: Of one island.
        asked: What is given or ruled out.
        top: How many to name.
        verify: Whether they are compiled; else formulas alone speak.
        device_gb: Budget of a device in 1e9 bytes; default what a step may take of its memory.
        processes: That compile at once; default the processors here.
        tell: Called with lines of progress.

    Raises:
        PlanError: Nothing fits, with what needs least; no mesh divides the model and its batch; the
            target is made of islands.
    """
    check_one_island(target, "plan")
    profile = profile_task(subject.task, plan, target)
    room = room_of(target, device_gb)
    found = search(profile, plan, target, room=room, asked=asked)
    tell(
        f"{found.scored} ways to run on {target.size} x {target.gpu.name} scored,"
        f" {len(found.candidates)} meshes fit"
    )
    if not verify:
        _check_any(found, room, target)
        plans = [
            Planned(candidate=one, seconds=one.predicted.seconds, found=None)
            for one in found.candidates[:top]
        ]
        return _answer(plans, found, 0, room)
    workers = processes or min(os.cpu_count() or 1, 8)
    proving = _Proving(subject, profile, target, room, workers, tell)
    waiting = list(found.candidates)
    while waiting and len(proving.proved) < top:
        count = top - len(proving.proved)
        proving.take(waiting[:count])
        waiting = waiting[count:]
        if proving.compiled >= 6 * top:
            break
    if not proving.proved:
        _check_any(found, room, target)
        raise PlanError(
            f"plan: of {len(found.candidates)} meshes that fit {room / _GIB:.1f} GiB by formula"
            f" none does once it is compiled ({proving.compiled} were); give more GPUs, shorter"
            " rows (--data.seq_len), or a mesh by --pin"
        )
    plans = sorted(proving.proved, key=lambda one: one.seconds.total)
    return _answer(plans, found, proving.compiled, room)


class _Proving:
    """Candidates compiled, and policies chosen anew by what that said."""

    def __init__(
        self,
        subject: Subject,
        profile: ModelProfile,
        target: Target,
        room: float,
        workers: int,
        tell: Tell,
    ):
        self._subject, self._profile, self._target = subject, profile, target
        self._room, self._workers, self._tell = room, workers, tell
        self.proved: list[Planned] = []
        self.compiled = 0

    def take(self, candidates: list[Candidate]) -> None:
        """Prove these; what fits joins `proved`."""
        first = self._compiled(candidates)
        second: list[tuple[Candidate, Planned | None]] = []
        for one, found in zip(candidates, first, strict=True):
            if "refused" in found:
                self._tell(f"{one.label}: refused, {found['refused']}")
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

    def _compiled(self, candidates: list[Candidate]) -> list[Compiled]:
        if candidates:
            self._tell(f"compiling {'; '.join(one.label for one in candidates)}")
        plans = [one.plan for one in candidates]
        found = compiled(self._subject, plans, self._target, self._workers)
        self.compiled += sum("refused" not in one for one in found)
        return found

    def _planned(self, one: Candidate, found: Compiled) -> Planned | None:
        total = found["device_bytes"]["total"]
        verdict = "fits" if total <= self._room else "is over the budget"
        self._tell(
            f"{one.label}: {total / _GIB:.2f} GiB compiled"
            f" ({one.predicted.bytes.total / _GIB:.2f} by formula), {verdict}"
        )
        if total > self._room:
            return None
        seconds = true_seconds(one.predicted.seconds, found)
        return Planned(candidate=one, seconds=seconds, found=found)

    def _again(self, one: Candidate, found: Compiled) -> Candidate | None:
        """The same mesh by what its program said; None where that changes nothing."""
        off = found["device_bytes"]["total"] - one.predicted.bytes.total
        left = self._room - found["device_bytes"]["total"]
        if 0 <= left < _WORTH * self._room:
            return None
        changed = again(self._profile, one, self._target, room=self._room - off)
        return None if changed is None or changed.plan == one.plan else changed


def _check_any(found: Found, room: float, target: Target) -> None:
    """Refuse where nothing fits, with what needs least.

    Raises:
        PlanError: Nothing does.
    """
    if found.candidates:
        return
    least, needs = found.smallest, ""
    if least is not None:
        size = least.predicted.bytes.total / _GIB
        needs = f"; {least.label} with {told(least)} needs least, {size:.1f} GiB by formula"
    raise PlanError(
        f"plan: nothing that is searched fits {room / _GIB:.1f} GiB of each of {target.size}"
        f" {target.gpu.name}{needs}; give more GPUs, shorter rows (--data.seq_len), or host memory"
        " (--plan.offload auto with a mesh of your own)"
    )


def _answer(plans: list[Planned], found: Found, count: int, room: float) -> Answer:
    plans_told = [
        one if at == 0 else dataclasses.replace(one, why_not_first=_why(one, plans[0]))
        for at, one in enumerate(plans)
    ]
    return Answer(plans=tuple(plans_told), scored=found.scored, compiled=count, room=room)


def _why(one: Planned, first: Planned) -> str:
    """What makes a plan slower than the first."""
    terms = {
        "compute": (one.seconds.compute, first.seconds.compute),
        "collectives that compute waits for": (one.seconds.waited, first.seconds.waited),
        "collectives beside compute that it does not last for": (
            one.seconds.exposed,
            first.seconds.exposed,
        ),
        "collectives beside compute": (one.seconds.beside, first.seconds.beside),
    }
    slower = one.seconds.total / first.seconds.total - 1
    name, (own, others) = max(terms.items(), key=lambda item: item[1][0] - item[1][1])
    if own <= others:
        return f"{slower:.1%} slower"
    return f"{slower:.1%} slower: {own:.3f} s of {name}, where the first has {others:.3f} s"
