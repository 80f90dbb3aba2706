"""The best serving plans on a target: searched by formula, compiled, in their true order."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from colossax.aot import Target, target_devices
from colossax.config import OffloadConfig, Plan, to_json
from colossax.errors import InputError, PlanError
from colossax.inference.engine.sizing import SHARE
from colossax.planner.counting.islands import check_one_island
from colossax.planner.searching.smallest import larger
from colossax.planner.searching.verifying import Tell, room_of
from colossax.planner.serving.laid import OnServingMesh, StepSeconds
from colossax.planner.serving.search import (
    AXES,
    FoundServing,
    ServingCandidate,
    Wish,
    candidate,
    counts_of,
    most_seats,
    search_serving,
)
from colossax.planner.serving.served import (
    Served,
    ServedProfile,
    profile_served,
    stages_refused,
)
from colossax.planner.serving.verifying import CompiledServing, compiled_serving

_GIB = 2**30

_TRIED = 3
"""Candidates for each plan that is to be named, of which those that fit are named."""

_WORTH = 0.02
"""Share of the budget that is left over, above which seats are chosen anew by what was compiled."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedServing:
    """One plan, and what is known of it.

    Attributes:
        candidate: What formulas say of it.
        found: What its compiled programs say; None where they were not compiled.
        served: What is served.
        slots: Most tokens of a request.
        why_not_first: Against the first; empty for that.
    """

    candidate: ServingCandidate
    found: CompiledServing | None
    served: Served
    slots: int
    why_not_first: str = ""

    @property
    def plan(self) -> Plan:
        """It."""
        return self.candidate.plan

    @property
    def seconds(self) -> StepSeconds:
        """From one token to the next, with collectives as compiled where those can be counted."""
        waited = None if self.found is None else self.found.waited
        predicted = self.candidate.seconds
        return predicted if waited is None else dataclasses.replace(predicted, waited=waited)

    @property
    def tokens_per_second(self) -> float:
        """Of all requests."""
        return self.candidate.all_seats / self.seconds.total

    @property
    def total_bytes(self) -> float:
        """Of a device: compiled, else predicted."""
        return self.candidate.bytes.total if self.found is None else float(self.found.total)

    @property
    def words(self) -> list[str]:
        """Options of `colossax serve` that go with the plan."""
        given = {
            "--seats": str(self.candidate.seats),
            "--slots": str(self.slots),
            "--weights": self.served.weights,
            "--cache": self.served.cache,
        }
        return [word for name, value in given.items() if value != "own" for word in (name, value)]

    def to_json(self) -> dict[str, Any]:
        """As plain JSON types."""
        one, found = self.candidate, self.found
        links = None if found is None else found.links
        return {
            "label": one.label,
            "plan": to_json(self.plan),
            "tokens_per_second": self.tokens_per_second,
            "latency_s": self.seconds.total,
            "seats": one.all_seats,
            "seats_of_each": one.seats,
            "slots": self.slots,
            "serve": self.words,
            "seconds": self.seconds.total,
            "seconds_by_term": self.seconds.terms,
            "device_bytes": {"total": one.bytes.total} if found is None else found.to_json(),
            "predicted_bytes": dataclasses.asdict(one.bytes),
            "collectives": None
            if links is None
            else [{**dataclasses.asdict(x.totals), "seconds": x.seconds} for x in links],
            "fits": True,  # by formula where it is not verified
            "verified": found is not None,
            "why_not_first": self.why_not_first,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingAnswer:
    """What planning came to.

    Attributes:
        plans: Most tokens a second first; all fit.
        scored: How many meshes were scored by formula.
        room: Bytes of a device that an engine might take.
    """

    plans: tuple[PlannedServing, ...]
    scored: int
    room: float

    @property
    def best(self) -> PlannedServing:
        """That of most tokens a second."""
        return self.plans[0]


def plan_serving(
    served: Served,
    plan: Plan,
    target: Target,
    *,
    wish: Wish,
    top: int = 3,
    verify: bool = True,
    device_gb: float | None = None,
    tell: Tell = lambda _: None,
) -> ServingAnswer:
    """The plans of most tokens a second that fit a target.

    Every mesh is scored by formula, with as many seats as its memory and the latency allow; the
    steps of the best are compiled. Where those leave room, or are over it, seats are chosen anew by
    what they said, and compiled again. No plan that was compiled and is over its budget is named.

    Args:
        served: What is served.
        plan: Precision, experts and kernels, which stay.
        target: Of one node.
        wish: Seats, latency, and what is given or ruled out of the mesh.
        top: How many to name.
        verify: Whether they are compiled; else formulas alone speak.
        device_gb: Budget of a device in 1e9 bytes; default what an engine takes of its memory.
        tell: Called with lines of progress.

    Raises:
        PlanError: Nothing fits, or nothing is soon enough, with what would do; the target is of
            several nodes; the plan has what is not searched and would be lost.
        InputError: The model cannot be served, nothing can be compiled here, or what is asked for
            names no dim.
    """
    _check(plan, target, wish)
    room = room_of(target, device_gb) if device_gb else SHARE * target.gpu.memory_bytes
    if verify:
        target_devices(target)  # refused at once where nothing can be compiled
    profile = profile_served(served, plan)
    wish.asked.check(profile)

    @functools.cache
    def staged() -> bool:
        why = stages_refused(profile, plan, target)
        if why is not None:
            tell(f"without stages: {why}")
        return why is None

    found = search_serving(profile, plan, target, room=room, wish=wish, staged=staged)
    tell(
        f"{found.scored} meshes of {target.size} x {target.gpu.name} divide the model; "
        f"{len(found.candidates)} fit"
    )
    if not found.candidates:
        short = found.least is not None and found.soonest is None
        searched = functools.partial(search_serving, profile, plan, room=room, wish=wish)
        more = (one for one in _larger(target) if searched(one, staged=staged).candidates)
        enough = next(more, None) if short else None
        raise PlanError(_nothing(target, found, room, wish, enough, served.weights))
    if not verify:
        plans = [_planned(profile, one, None) for one in found.candidates[:top]]
        return _answer(plans, found, room)
    proving = _Proving(profile, target, room, wish, tell)
    for one in found.candidates[: _TRIED * top]:
        if len(proving.proved) == top:
            break
        proving.take(one)
    if not proving.proved:
        raise PlanError(
            f"plan --serve: {proving.tried} plans were compiled or refused, and none fits"
            f" {room / _GIB:.1f} GiB of each of {target.size} {target.gpu.name} within what is"
            f" asked, the last: {proving.last}; give fewer seats, a shorter --context, or more GPUs"
        )
    return _answer(proving.proved, found, room)


class _Proving:
    """Candidates compiled, and seats chosen anew by what that said."""

    def __init__(self, profile: ServedProfile, target: Target, room: float, wish: Wish, tell: Tell):
        self._profile, self._target, self._room = profile, target, room
        self._wish, self._tell = wish, tell
        self.proved: list[PlannedServing] = []
        self.tried, self.last = 0, ""

    def take(self, one: ServingCandidate) -> None:
        """Prove it; what fits joins `proved`, with the seats that its programs leave room for."""
        first = self._compiled(one)
        if first is None:
            return
        changed = self._again(one, first)
        both = [self._fitting(one, first)]
        if changed is not None and (second := self._compiled(changed)) is not None:
            both.append(self._fitting(changed, second))
        fits = [planned for planned in both if planned is not None]
        if fits:
            self.proved.append(max(fits, key=lambda planned: planned.tokens_per_second))

    def _compiled(self, one: ServingCandidate) -> CompiledServing | None:
        self._tell(f"compiling {one.label}")
        self.tried += 1
        try:
            return compiled_serving(self._profile, one, self._target)
        except (PlanError, InputError) as problem:
            self.last = str(problem)
            self._tell(f"{one.label}: refused, {problem}")
            return None

    def _fitting(self, one: ServingCandidate, found: CompiledServing) -> PlannedServing | None:
        planned = _planned(self._profile, one, found)
        late = self._wish.latency_s is not None and planned.seconds.total > self._wish.latency_s
        verdict = "fits"
        if found.total > self._room:
            verdict = "is over the budget"
        elif late:
            verdict = f"takes {1e3 * planned.seconds.total:.1f} ms a token, which is too late"
        self.last = (
            f"{one.label}: {found.total / _GIB:.2f} GiB compiled"
            f" ({one.bytes.total / _GIB:.2f} by formula), {verdict}"
        )
        self._tell(self.last)
        return planned if verdict == "fits" else None

    def _again(self, one: ServingCandidate, found: CompiledServing) -> ServingCandidate | None:
        """The same mesh with the seats that its programs leave room for; None where they stay."""
        left = self._room - found.total
        laid = OnServingMesh(self._profile, one.plan, self._target)
        latency = self._wish.latency_s
        if latency is not None and found.waited is not None:
            latency -= found.waited - one.seconds.waited
        if 0 <= left < _WORTH * self._room and latency == self._wish.latency_s:
            return None
        room = self._room - (found.total - one.bytes.total)
        seats = most_seats(laid, counts_of(laid, self._wish), room, latency)
        return None if seats is None or seats == one.seats else candidate(laid, seats)


def _planned(
    profile: ServedProfile, one: ServingCandidate, found: CompiledServing | None
) -> PlannedServing:
    return PlannedServing(candidate=one, found=found, served=profile.served, slots=profile.context)


def _check(plan: Plan, target: Target, wish: Wish) -> None:
    """Refuse what is not searched, and what no server runs on.

    Raises:
        PlanError: The target is of several nodes or kinds, the plan puts something into host
            memory.
        InputError: An axis is given that engines have no use for.
    """
    check_one_island(target, "plan --serve")
    if target.nodes > 1:
        raise PlanError(
            f"plan --serve: a server runs on the GPUs of one node, and target '{target.name}' has"
            f" {target.nodes}; give one, as --target {target.gpu.key}:1x{target.gpus}, and a server"
            " on each"
        )
    if dataclasses.replace(plan.offload, device_gb=None, host_gb=None) != OffloadConfig():
        raise PlanError(
            "plan.offload: host memory is not searched for serving yet; switch it off"
            " (--plan.offload none), or give shares to colossax serve by hand"
        )
    known = [axis.value for axis in AXES]
    named = {axis for axis, size in wish.asked.sizes.items() if size > 1}
    for axis in sorted(named - set(known)):
        raise InputError(
            f"--pin {axis}: engines are not split along it; they are along {', '.join(known)}"
        )


def _larger(target: Target) -> list[Target]:
    """Nodes of more of the same GPUs."""
    return [one for one in larger(target) if one.nodes == 1]


def _nothing(
    target: Target,
    found: FoundServing,
    room: float,
    wish: Wish,
    more: Target | None,
    weights: str,
) -> str:
    """That nothing is found, with what would do."""
    least, soonest = found.least, found.soonest
    if least is None:
        shown = f", with {wish.asked.shown}" if wish.asked.shown else ""
        seats = "" if wish.seats is None else f" and shares {wish.seats} seats"
        return (
            f"plan --serve: no mesh of {target.size} x {target.gpu.name} divides the model"
            f"{seats}{shown}; leave pins out, or give another number of GPUs or seats"
        )
    if soonest is not None:
        assert wish.latency_s is not None
        return (
            f"plan --serve: nothing that fits gives a token within {1e3 * wish.latency_s:g} ms;"
            f" {soonest.label} is soonest by formula, {1e3 * soonest.seconds.total:.3g} ms; give"
            f" --latency-ms {math.ceil(1e4 * soonest.seconds.total) / 10:g} or more, fewer seats,"
            " or a shorter --context"
        )
    needs = least.bytes.total
    enough = f"{more.name} (the fewest of these GPUs that fit it by formula), " if more else ""
    ways = "fewer seats, " * (wish.seats is not None) + "a shorter --context"
    codes = ", or weights in codes (--weights int8)" if weights == "own" else ""
    return (
        f"plan --serve: nothing fits {room / _GIB:.1f} GiB of each of {target.size}"
        f" {target.gpu.name}; {least.label} needs least, {needs / _GIB:.1f} GiB by formula; give"
        f" {enough}{ways}{codes}"
    )


def _answer(plans: Sequence[PlannedServing], found: FoundServing, room: float) -> ServingAnswer:
    ordered = sorted(plans, key=lambda one: -one.tokens_per_second)
    told = [
        one if at == 0 else dataclasses.replace(one, why_not_first=_why(one, ordered[0]))
        for at, one in enumerate(ordered)
    ]
    return ServingAnswer(plans=tuple(told), scored=found.scored, room=room)


def _why(one: PlannedServing, first: PlannedServing) -> str:
    """What makes a plan give fewer tokens a second than the first, for as many requests."""
    fewer = f"{1 - one.tokens_per_second / first.tokens_per_second:.1%} fewer tokens/s"
    seats, firsts = one.candidate.all_seats, first.candidate.all_seats
    names = {
        "reading": "reading weights and cache",
        "compute": "matmuls",
        "waited": "collectives",
        "handed": "handing hidden states on",
        "idle": "waiting for the fullest stage",
    }
    own = {name: seconds / seats for name, seconds in _shown(one.seconds).items()}
    other = {name: seconds / firsts for name, seconds in _shown(first.seconds).items()}
    name = max(own, key=lambda key: own[key] - other[key])
    if own[name] <= other[name]:
        return fewer
    shared = f"{1e6 * own[name]:.3g} us a token of {names[name]}"
    held = f", with {seats} seats where it has {firsts}" if seats != firsts else ""
    return f"{fewer}: {shared}, where the first has {1e6 * other[name]:.3g}{held}"


def _shown(seconds: StepSeconds) -> dict[str, float]:
    """What counts: of reading and compute the longer."""
    terms = seconds.terms
    hidden = "compute" if terms["reading"] >= terms["compute"] else "reading"
    return {**terms, hidden: 0.0}
