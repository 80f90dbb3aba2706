"""All meshes, microbatches and policies scored; the best of each mesh kept, the fastest first."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from colossax.aot import Target
from colossax.config import (
    SAVEABLE,
    LossConfig,
    MeshAxis,
    Plan,
    Segment,
)
from colossax.errors import PlanError
from colossax.planner.profiling import ModelProfile
from colossax.planner.searching.asked import NOTHING_ASKED, Asked
from colossax.planner.searching.bounds import Bounds, Fastest, divisors
from colossax.planner.searching.hosted import best_placed, tier_of
from colossax.planner.searching.hosted_stages import best_staged
from colossax.planner.searching.meshes import limits_of
from colossax.planner.searching.parts import Choices
from colossax.planner.searching.policies import Policy, fastest_mix
from colossax.planner.searching.predicting import OnMesh, Policies, Prediction, policies_of
from colossax.planner.searching.scored import Scored
from colossax.planner.searching.seconds import Rates, rates_of

CHUNKS = (1, 8, 32)
"""Of the vocabulary, beside what the plan has."""

MARGIN = 0.98
"""Share of the room that formulas may fill, as they err."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan and what formulas say of it.

    Attributes:
        words: Rules, and how stages run, for people.
        base: The plan on its mesh.
        way: How it runs there.
        predicted: Bytes and seconds.
    """

    words: str
    base: Plan
    way: Scored
    predicted: Prediction

    @property
    def label(self) -> str:
        """Mesh and `words`."""
        sizes = [f"{axis}={n}" for axis, n in self.base.mesh.items() if n > 1]
        return " ".join([*sizes, self.words])

    @functools.cached_property
    def plan(self) -> Plan:
        """The whole plan."""
        return _with(self.base, self.way)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """What a search came to.

    Attributes:
        candidates: The fastest of each mesh and way to have it that fits, the fastest first.
        smallest: Of what does not fit, that which needs least; None where all do. Of all meshes
            where there is no candidate.
        scored: Plans that were scored.
    """

    candidates: tuple[Candidate, ...]
    smallest: Candidate | None
    scored: int


def search(
    profile: ModelProfile,
    plan: Plan,
    target: Target,
    *,
    room: float,
    asked: Asked = NOTHING_ASKED,
    margin: float = MARGIN,
    count: int = 18,
    rates: Rates | None = None,
    host: float | None = None,
    disk: float | None = None,
) -> Found:
    """The fastest layouts of a model, by formula.

    Ways to run are taken by the least seconds that they might need, until so many are known that no
    other can be among them.

    Args:
        profile: The model.
        plan: What `bare` names is replaced, all else stays.
        target: Where.
        room: Bytes of a device.
        asked: What is given or ruled out.
        margin: Share of `room` that formulas may fill, as they err.
        count: How many of the fastest are surely among the candidates.
        rates: That were measured; default what is assumed of the target.
        host: Bytes of the host for each device, where layers' arrays may live there.
        disk: Bytes of a file for each device, where layers' optimizer state may lie in one.

    Raises:
        PlanError: No mesh that was asked for divides the model and its batch; how fast the GPUs
            are for the plan is not known.
    """
    # Refused at once: what follows passes over plans that do not fit.
    rates = rates_of(target, plan) if rates is None else rates
    room *= margin
    found: list[Candidate] = []
    smallest: Candidate | None = None
    scored, choices, divided = 0, dict[int, Choices](), False
    # What layers keep need not fit a device where it may live elsewhere.
    bounds = Bounds(profile, plan, target, rates, room if host is None else math.inf)
    fastest = Fastest(count)
    for at_least, _, way in bounds.ordered(asked.pinned):
        if at_least > fastest.slowest:
            break
        ruled_plan = way.plan()
        if id(way.rules) not in choices:
            choices[id(way.rules)] = Choices(ruled_plan.effective_rules)
        try:
            on_mesh = OnMesh(profile, ruled_plan, target, choices[id(way.rules)], rates)
        except PlanError:
            continue
        divided = True
        if not asked.held(profile.infos, on_mesh.parts):
            continue
        best, least, number = _best(on_mesh, plan.loss.vocab_chunks, room)
        if host is not None and way.hosts:
            best, more = _with_host(on_mesh, plan.loss.vocab_chunks, room, host, disk, best)
            number += more
        scored += number
        one = _candidate(way.words, ruled_plan, on_mesh, least if best is None else best)
        if best is not None:
            found.append(one)
            fastest.add(best.seconds)
        elif smallest is None or least.bytes < smallest.predicted.bytes.total:
            smallest = one
    if not scored:
        raise PlanError(_no_mesh(profile, target, asked, divided=divided))
    ordered = sorted(found, key=lambda one: one.predicted.seconds.total)
    return Found(candidates=tuple(ordered), smallest=smallest, scored=scored)


def again(
    profile: ModelProfile,
    one: Candidate,
    target: Target,
    *,
    room: float,
    rates: Rates | None = None,
    host: float | None = None,
    disk: float | None = None,
) -> Candidate | None:
    """The fastest on a candidate's mesh that formulas fit into `room`; None where nothing does.

    Where it has layers in host memory, the same with others of them.
    """
    on_mesh = OnMesh(profile, one.plan, target, rates=rates)
    chunks = one.plan.loss.vocab_chunks
    if host is not None and one.way.placed is not None:
        best, _ = _with_host(on_mesh, chunks, room, host, disk, None)
    else:
        best, _, _ = _best(on_mesh, chunks, room)
    return None if best is None else _candidate(one.words, one.plan, on_mesh, best)


def _candidate(words: str, plan: Plan, on_mesh: OnMesh, chosen: "Scored") -> Candidate:
    given = chosen.rows, chosen.mix, chosen.chunks
    if chosen.placed is None:
        predicted = on_mesh.predicted(*given)
    else:
        predicted = tier_of(on_mesh, chosen.placed).predicted(*given, chosen.placed)
    return Candidate(words=words, base=plan, way=chosen, predicted=predicted)


def _with_host(
    mesh: OnMesh,
    chunks: int,
    room: float,
    host: float,
    disk: float | None,
    without: Scored | None,
) -> tuple[Scored | None, int]:
    """The faster of what was found for devices alone and the best with host memory, and how many
    of those were scored."""
    policies, below = _policies(mesh), math.inf if without is None else without.seconds
    given = mesh, policies, sorted({chunks, *CHUNKS}), room, host
    if mesh.stages.count > 1:
        best, scored = best_staged(*given, functools.partial(_mix, mesh, policies), below=below)
    else:
        best, scored = best_placed(*given, disk, below=below)
    return without if best is None else best, scored


def _no_mesh(profile: ModelProfile, target: Target, asked: Asked, *, divided: bool) -> str:
    told = f" with {asked.shown}" if asked.shown else ""
    stages, layers = asked.pinned.get(MeshAxis.STAGE, 1), limits_of(profile).layers
    if stages > 1 and (not layers or layers % stages):
        problem = f"do not divide {layers} layers" if layers else "cannot share this model's layers"
        instead = "pin a number that does, or none" if layers else "pin no stages"
        return f"plan: {stages} stages {problem} in one program; {instead}"
    pinned = math.prod(asked.sizes.values())
    if target.size % pinned:
        sizes = ", ".join(f"{axis}={size}" for axis, size in asked.sizes.items())
        return (
            f"plan: {sizes} takes {pinned} devices, which do not divide the {target.size} of"
            f" {target.name}; pin sizes whose product does"
        )
    if divided:
        return (
            f"plan: no mesh of {target.size} devices has what is asked for, {asked.shown}; pin less"
        )
    return (
        f"plan: no mesh of {target.size} devices{told} divides {profile.rows} rows of"
        f" {profile.tokens} tokens and the model's heads and widths; give another target or"
        f" number of rows{', or pin less' if told else ''}"
    )


def _best(mesh: OnMesh, chunks: int, room: float) -> tuple[Scored | None, Scored, int]:
    """The fastest that fits on one mesh, that which needs least, and how many were scored."""
    best = least = None
    scored = 0
    every, policies = divisors(mesh.rows)[-mesh.profile.whole :], _policies(mesh)
    for rows in every:
        fitting = False
        for pieces in sorted({chunks, *CHUNKS}):
            scored += 1
            one = _scored(mesh, policies, rows, pieces, room)
            if least is None or one.bytes < least.bytes:
                least = one
            if one.bytes > room:
                continue
            fitting = True
            # More pieces leave more room, which is of use where not all that helps is kept.
            if best is None or one.seconds < best.seconds:
                best = one
            if one.fastest:
                break
        # More rows need more, but for the last: one microbatch has no sums of gradients.
        if not fitting and rows != every[-1]:
            last = _scored(mesh, policies, every[-1], max(chunks, *CHUNKS), room)
            least = last if least is None or last.bytes < least.bytes else least
            if last.bytes <= room and (best is None or last.seconds < best.seconds):
                best = last
            break
    assert least is not None
    return best, least, scored


def _scored(
    mesh: OnMesh, policies: Sequence[Policy], rows: int, chunks: int, room: float
) -> Scored:
    left = room - mesh.bytes(rows, 0.0, chunks).total
    mix = _mix(mesh, policies, left / rows, mesh.stages.slots(mesh.rows // rows))
    ideal = min((one.seconds for one in policies), default=0.0)
    ideal_names = {one.names for one in policies if one.seconds <= ideal}
    predicted = mesh.predicted(rows, mix, chunks)
    return Scored(
        seconds=predicted.seconds.total,
        bytes=predicted.bytes.total,
        rows=rows,
        chunks=chunks,
        mix=mix,
        fastest=all(names in ideal_names for runs in mix for _, names in runs),
    )


def _policies(mesh: OnMesh) -> list[Policy]:
    """Each that all kinds of layers know, with what they take and keep of a row under it: all
    layers, or those of one chunk of a stage."""
    share = mesh.stages.share
    kinds, tokens = mesh.profile.kinds, mesh.tokens(1)
    each = list(enumerate(kinds))
    return [
        Policy(
            names=one,
            seconds=sum(k.calls * mesh.layer_seconds(at, one, tokens) for at, k in each) / share,
            bytes=sum(k.calls * mesh.kept(at, one, tokens) for at, k in each) / share,
        )
        for one in policies_of(mesh.profile)
    ]


def _mix(mesh: OnMesh, policies: Sequence[Policy], left: float, slots: int) -> Policies:
    """What layers keep with so many bytes for a row; where nothing fits, their inputs alone.

    Stages keep it in slots, and take what has names out of one whole.
    """
    kinds, share = mesh.profile.kinds, mesh.stages.share
    full = [[(kind.calls // share, frozenset[str]())] for kind in kinds]
    inputs = min((one.bytes for one in policies), default=0.0)
    one_more = mesh.stages.count > 1
    held = [
        dataclasses.replace(one, bytes=slots * one.bytes + one_more * (one.bytes - inputs))
        for one in policies
    ]
    if len(kinds) == 1 and kinds[0].group == 1:
        layers = kinds[0].calls // share
        each = [
            dataclasses.replace(one, seconds=one.seconds / layers, bytes=one.bytes / layers)
            for one in held
        ]
        mix = fastest_mix(each, layers, left)
        return full if mix is None else [[(count, one.names) for count, one in mix]]
    fitting = [one for one in held if one.bytes <= left]
    if not fitting:
        return full
    chosen = min(fitting, key=lambda one: one.seconds)
    return [[(kind.calls, chosen.names)] for kind in kinds]


def _with(plan: Plan, one: Scored) -> Plan:
    """The plan that runs so."""
    if not one.mix:
        runs = []
    elif len(one.mix) == 1 and len(one.mix[0]) > 1:
        runs = one.mix[0]
    else:
        runs = [(-1, one.mix[0][0][1])]
    segments = tuple(Segment(count=count, remat=remat_of(names)) for count, names in runs)
    plan = plan.replace(
        batch=dataclasses.replace(plan.batch, accumulation=1, microbatch=one.rows),
        segments=segments or (Segment(),),
        loss=LossConfig(vocab_chunks=one.chunks),
    )
    if one.placed is None:
        return plan
    return plan.placed(one.placed.settings)


def remat_of(names: frozenset[str]) -> str:
    """What a segment with these names is called."""
    return "+".join(name for name in SAVEABLE if name in names) or "full"


def told(one: Any) -> str:
    """Microbatches and policies of a plan, for people."""
    plan, count = one.plan, one.predicted.microbatches
    rows, staged = plan.batch.microbatch, plan.mesh.get(MeshAxis.STAGE, 1) > 1
    every = " of each stage" if plan.pipeline.chunks == 1 else " of each chunk of a stage"
    layers = [_kept_words(part, every * staged) for part in plan.segments]
    placed = one.way.placed if isinstance(one, Candidate) else None
    layers += [placed.shown] if placed and placed.shown else []
    return (
        f"{rows} row{'s' if rows != 1 else ''} of each device at a time,"
        f" {count} time{'s' if count != 1 else ''} a step; {', '.join(layers)}"
    )


def _kept_words(part: Segment, of: str) -> str:
    """What layers of a segment keep; `of` says whose they are."""
    one = part.count == 1
    who = "all layers" if part.count == -1 else f"{part.count} layer{'s' * (not one)}{of}"
    if part.remat == "full":
        return f"{who} recompute{'s' * one} all"
    return f"{who} keep{'s' * one} {'all' if part.remat == 'none' else part.remat}"
