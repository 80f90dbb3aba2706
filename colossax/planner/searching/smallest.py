"""Where nothing fits: the smallest budget and the fewest GPUs that would do, by formula."""

import dataclasses
import functools
import math

from colossax.aot import Target
from colossax.aot.targets import MAX_DEVICES
from colossax.config import Plan
from colossax.errors import PlanError
from colossax.planner.profiling import ModelProfile, bare
from colossax.planner.searching.asked import Asked
from colossax.planner.searching.meshes import limits_of, meshes, ruled
from colossax.planner.searching.predicting import OnMesh
from colossax.planner.searching.search import CHUNKS, MARGIN, Candidate, search

_NODE = 8
"""GPUs of a node that is filled up, where a target has fewer."""

_STEP = 1e8
"""Bytes that a budget is rounded up to; one of less than 1e9, to two digits."""


def smallest_gb(least: Candidate) -> float:
    """The least budget of a device, in 1e9 bytes, within which formulas fit a plan.

    Args:
        least: What needs least, of a search that fitted nothing.
    """
    return rounded_up(least.predicted.bytes.total / MARGIN)


def smallest_target(
    profile: ModelProfile, plan: Plan, target: Target, *, room: float, asked: Asked
) -> Target | None:
    """The fewest more GPUs of the same kind on which formulas fit a plan; None where none do.

    Nodes stay as they are, but for one that is alone and has less than eight GPUs, which is filled
    first.

    Args:
        profile: The model.
        plan: See `search`.
        target: On which nothing fits.
        room: Bytes of a device.
        asked: What is given or ruled out.

    Cost: what every mesh of every larger target needs at least, up to the first that fits; those
    whose devices do not hold parameters and optimizer state between them are passed over.
    """
    return next((one for one in larger(target) if _fits(profile, plan, one, room, asked)), None)


def smallest_tiers(
    profile: ModelProfile,
    plan: Plan,
    target: Target,
    *,
    room: float,
    asked: Asked,
    beside: float | None = None,
) -> list[str]:
    """Host memory or a file for each device, in 1e9 bytes, with which formulas fit a plan, as
    options for people; empty where layers' arrays cannot live there, or no amount would do.

    Of the fastest plans with any amount, that which needs least.

    Args:
        profile: The model.
        plan: See `search`.
        target: On which nothing fits.
        room: Bytes of a device.
        asked: What is given or ruled out.
        beside: Bytes of the host beside which there may be a file; None: there is to be none.
    """
    if profile.moves:
        return []
    searched = functools.partial(search, profile, plan, target, room=room, asked=asked)
    found = searched(host=math.inf).candidates
    least = min((one.predicted.host for one in found), default=None)
    ways = []
    if least:
        shown = rounded_up(least)
        ways.append(f"--host-gb {shown:.4g} (of host memory for each; by formula it then fits)")
    if beside is not None:
        found = searched(host=beside, disk=math.inf).candidates
        files = [one.predicted.file for one in found if one.predicted.file]
        if files:
            shown = rounded_up(min(files))
            ways.append(f"--disk-gb {shown:.4g} (of a file for each; by formula it then fits)")
    return ways


def rounded_up(size: float) -> float:
    """Bytes as a budget in 1e9 bytes."""
    step = min(_STEP, 10.0 ** (math.floor(math.log10(size)) - 1)) if size else _STEP
    return math.ceil(size / step) * step / 1e9


def _fits(profile: ModelProfile, plan: Plan, target: Target, room: float, asked: Asked) -> bool:
    """Whether a search would find a plan."""
    room, limits = MARGIN * room, limits_of(profile)
    infos = zip(profile.infos, profile.moments, strict=True)
    states = sum(
        math.prod(info.shape) * (info.at_rest(plan.precision.params).itemsize + moment)
        for info, moment in infos
    )
    if states > room * target.size:
        return False
    # What splits storage most is the likeliest to fit.
    ordered = sorted(meshes(target, limits, asked.pinned), key=lambda mesh: -mesh["fsdp"])
    return any(
        _least(profile, way.plan(), target, asked) <= room
        for mesh in ordered
        for way in ruled(bare(plan), mesh, limits)
        if way.smallest
    )


def _least(profile: ModelProfile, plan: Plan, target: Target, asked: Asked) -> float:
    """Bytes of a device, layers keeping their inputs alone; infinite where the mesh divides
    nothing or is not what is asked for.

    As many rows as there are may need less than one: their gradients are not added up.
    """
    try:
        mesh = OnMesh(profile, plan, target)
        if not asked.held(profile.infos, mesh.parts):
            return math.inf
    except PlanError:
        return math.inf
    chunks = max(plan.loss.vocab_chunks, *CHUNKS)
    full = [[(kind.calls // mesh.stages.share, frozenset[str]())] for kind in profile.kinds]
    counts = {mesh.rows} if profile.whole else {1, mesh.rows}
    return min(mesh.predicted(rows, full, chunks).bytes.total for rows in counts)


def larger(target: Target) -> list[Target]:
    """Of the same GPUs, smaller first."""
    nodes, gpus = target.nodes, target.gpus
    counts = []
    if nodes == 1 and gpus < _NODE:
        counts = [(1, more) for more in range(gpus + 1, _NODE + 1)]
        gpus = _NODE
    counts += [(more, gpus) for more in range(nodes + 1, MAX_DEVICES // gpus + 1)]
    (island,) = target.islands
    return [
        dataclasses.replace(target, islands=(dataclasses.replace(island, nodes=more, gpus=each),))
        for more, each in counts
    ]
