"""The best plans for several kinds of nodes: searched by formula, compiled, in their order."""

import dataclasses
import math
import os
from collections.abc import Callable, Sequence

from colossax.aot import Target, target_devices
from colossax.aot.targets import MAX_DEVICES
from colossax.config import Plan
from colossax.errors import PlanError
from colossax.planner.counting.compiled import check_cudnn
from colossax.planner.profiling import ModelProfile, profile_task
from colossax.planner.searching.asked import Asked
from colossax.planner.searching.island_layouts import IslandCandidate, IslandPrediction, Layout
from colossax.planner.searching.islands import chunks_of, search_islands
from colossax.planner.searching.planned import Answer, Planned, answer_of
from colossax.planner.searching.verifying import Compiled, Subject, Tell, compiled, room_of

_GIB, _TRIED, _STEP = 2**30, 4, 1e8

Search = Callable[[Target, Sequence[float]], list[tuple[IslandCandidate, Layout]]]


def plan_islands(
    subject: Subject,
    plan: Plan,
    target: Target,
    *,
    asked: Asked,
    top: int,
    verify: bool,
    device_gb: float | None,
    processes: int | None,
    tell: Tell,
) -> Answer:
    """The fastest plans that fit a target of several islands; see `plan_run`.

    Stages go across islands and all else stays within one; layers are shared so that the slowest
    stage is the least slow. Each stage's programs are compiled for its own GPUs, and held against
    its own room; where they leave room or are over it, layers and policies are chosen once more.

    Raises:
        PlanError: Nothing fits; see `search_islands`.
        InputError: See `plan_run`.
    """
    rooms = [room_of(one, device_gb) for one in target.apart]
    if verify:
        target_devices(target)
        check_cudnn(plan, target)
    profile = profile_task(subject.task, plan, target.apart[0])
    asked.check(profile)
    found, scored = search_islands(profile, plan, target, rooms=rooms, asked=asked)
    tell(f"{scored} plans on {target.name} scored; {len(found)} layouts of stages fit")

    def search(other: Target, room: Sequence[float]) -> list[tuple[IslandCandidate, Layout]]:
        try:
            return search_islands(profile, plan, other, rooms=room, asked=asked)[0]
        except PlanError:
            return []

    if not verify and found:
        plans = [_planned(one, None) for one, _ in found[:top]]
        return answer_of(plans, scored, 0, _room(plans[0], found[0][1], rooms), "")
    proving = _Proving(subject, profile, plan, target, rooms, processes, tell)
    waiting = list(found) if verify else []
    while waiting and proving.tried < _TRIED * top and (count := top - len(proving.proved)) > 0:
        proving.take(waiting[:count])
        waiting = waiting[count:]
    if not proving.proved:
        tell("looking for what would do")
        raise PlanError(
            _nothing(target, rooms, proving) + _enough(target, rooms, device_gb, search)
        )
    proved = sorted(proving.proved, key=lambda one: one[0].seconds.total)
    plans = [one for one, _ in proved]
    return answer_of(plans, scored, proving.compiled, _room(*proved[0], rooms), "")


def _planned(one: IslandCandidate, found: Compiled | None) -> Planned:
    return Planned(candidate=one, seconds=one.predicted.seconds, found=found)


def _sizes(one: Planned) -> list[float]:
    """Bytes of a device of each stage."""
    if one.found is None:
        predicted = one.candidate.predicted
        assert isinstance(predicted, IslandPrediction)
        return list(predicted.stages)
    return [float(stage["device_bytes"]) for stage in one.found["stages"]]


def _room(one: Planned, layout: Layout, rooms: Sequence[float]) -> float:
    """Of the stage that fills it most."""
    pairs = [(size, rooms[at]) for size, at in zip(_sizes(one), layout.order, strict=True)]
    return max(pairs, key=lambda pair: pair[0] / pair[1])[1]


class _Proving:
    """Candidates compiled, and layers shared anew by what that said."""

    def __init__(
        self,
        subject: Subject,
        profile: ModelProfile,
        plan: Plan,
        target: Target,
        rooms: Sequence[float],
        processes: int | None,
        tell: Tell,
    ):
        self._subject, self._profile, self._plan, self._target = subject, profile, plan, target
        self._rooms, self._tell = rooms, tell
        self._workers = processes or min(os.cpu_count() or 1, 8)
        self.proved: list[tuple[Planned, Layout]] = []
        self.compiled = self.tried = 0
        self.refusal = ""

    def take(self, candidates: Sequence[tuple[IslandCandidate, Layout]]) -> None:
        """Prove these; what fits joins `proved`."""
        again = []
        for (one, layout), found in zip(candidates, self._compiled(candidates), strict=True):
            if "refused" in found:
                continue
            planned = self._fitting(one, layout, found)
            changed = self._again(one, layout, found)
            if changed is not None:
                again.append((changed, layout, planned))
            elif planned is not None:
                self.proved.append((planned, layout))
        new = [(one, layout) for one, layout, _ in again]
        for (one, layout, before), found in zip(again, self._compiled(new), strict=True):
            after = None if "refused" in found else self._fitting(one, layout, found)
            both = [planned for planned in (before, after) if planned is not None]
            if both:
                best = min(both, key=lambda planned: planned.seconds.total)
                self.proved.append((best, layout))

    def _compiled(self, candidates: Sequence[tuple[IslandCandidate, Layout]]) -> list[Compiled]:
        if not candidates:
            return []
        self._tell(f"compiling {'; '.join(one.label for one, _ in candidates)}")
        plans = [one.plan for one, _ in candidates]
        found = compiled(self._subject, plans, self._target, self._workers)
        self.tried += len(found)
        self.compiled += sum("refused" not in one and not one.get("kept") for one in found)
        for (one, _), each in zip(candidates, found, strict=True):
            if "refused" in each:
                self.refusal = each["refused"]
                self._tell(f"{one.label}: refused, {self.refusal}")
        return found

    def _fitting(self, one: IslandCandidate, layout: Layout, found: Compiled) -> Planned | None:
        planned = _planned(one, found)
        sizes = _sizes(planned)
        fits = all(size <= self._rooms[at] for size, at in zip(sizes, layout.order, strict=True))
        self._tell(
            f"{one.label}: {_shown(sizes)} GiB of each stage compiled"
            f" ({_shown(one.predicted.stages)} by formula),"
            f" {'fits' if fits else 'is over the budget'}"
        )
        return planned if fits else None

    def _again(
        self, one: IslandCandidate, layout: Layout, found: Compiled
    ) -> IslandCandidate | None:
        """The same stages by what their programs said; None where that changes nothing."""
        sizes = [float(stage["device_bytes"]) for stage in found["stages"]]
        off = [size - said for size, said in zip(sizes, one.predicted.stages, strict=True)]
        chunks = chunks_of(self._profile, self._plan)
        changed, _ = layout.best(self._rooms, chunks=chunks, off=off)
        return changed if changed is not None and changed.plan != one.plan else None


def _shown(sizes: Sequence[float]) -> str:
    return " and ".join(f"{size / _GIB:.2f}" for size in sizes)


def _nothing(target: Target, rooms: Sequence[float], proving: _Proving) -> str:
    told = " and ".join(
        f"{room / _GIB:.1f} GiB of each {one.gpu.name}"
        for room, one in zip(rooms, target.islands, strict=True)
    )
    seen = f"; {proving.tried} were tried and {proving.compiled} compiled" if proving.tried else ""
    seen += f", the last refusal: {proving.refusal}" if proving.refusal else ""
    return f"plan: nothing that is searched fits {told}, on '{target.name}'{seen}"


def _enough(target: Target, rooms: Sequence[float], device_gb: float | None, search: Search) -> str:
    """What would do, by formula: a larger budget, or more nodes of each island."""
    ways = []
    whole = [room_of(one, None) for one in target.apart]
    if device_gb is not None and search(target, whole):
        low, high = device_gb * 1e9, max(whole)
        while high - low > _STEP:
            middle = (low + high) / 2
            fits = search(target, [min(room, middle) for room in whole])
            low, high = (low, middle) if fits else (middle, high)
        ways.append(f"--device-gb {math.ceil(high / _STEP) * _STEP / 1e9:.1f}")
    times = 2
    while times * target.size <= MAX_DEVICES:
        islands = tuple(dataclasses.replace(i, nodes=times * i.nodes) for i in target.islands)
        larger = dataclasses.replace(target, islands=islands)
        if search(larger, rooms):
            ways.append(f"{larger.name}")
            break
        times *= 2
    if not ways:
        return "; no number of such nodes fits it by formula; give shorter rows or other GPUs"
    return f"; by formula these would do: {' or '.join(ways)}"
