"""Plans for several kinds of nodes: stages across islands, one mesh within each.

All stages have as many devices, and each has programs of its own, so that what lies in an island
follows from shapes as in `memory` and `seconds`; layers are shared by what a stage's GPUs take of
one, and by the room that they have.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from colossax.aot import Island, Link, Target
from colossax.config import MeshAxis, Plan
from colossax.errors import PlanError
from colossax.planner.profiling import ModelProfile, bare
from colossax.planner.searching.asked import Asked
from colossax.planner.searching.bounds import divisors
from colossax.planner.searching.island_costs import OnIsland
from colossax.planner.searching.island_layouts import IslandCandidate, Layout
from colossax.planner.searching.meshes import limits_of, meshes, ruled
from colossax.planner.searching.search import CHUNKS, MARGIN

_ORDERED = 4
"""Islands of which all orders are tried; more keep the target's."""


def check_islands(profile: ModelProfile, target: Target, asked: Asked) -> None:
    """Refuse a model that no stages could share, or a mesh without any.

    Raises:
        PlanError: It is one.
    """
    instead = f"give one of them, as --target {target.islands[0].name}"
    if not profile.staged or len(profile.kinds) != 1:
        raise PlanError(
            f"plan: target '{target.name}' is made of islands, which stages alone may cross, and"
            f" this model's layers are not of one kind that stages could share; {instead}"
        )
    stages = asked.pinned.get(MeshAxis.STAGE)
    if stages is not None and stages < len(target.islands):
        raise PlanError(
            f"plan: target '{target.name}' is made of {len(target.islands)} islands, which stages"
            f" alone may cross, and there {'is' if stages == 1 else 'are'} {stages}; allow as many"
            f" stages as islands or more, or {instead}"
        )


def layouts(profile: ModelProfile, plan: Plan, target: Target, asked: Asked) -> Iterator[Layout]:
    """Every number of stages, mesh within them, and order of the islands."""
    limits, pinned = limits_of(profile), dict(asked.pinned)
    stages = pinned.pop(MeshAxis.STAGE, None)
    common = math.gcd(*(island.size for island in target.islands))
    layers = profile.kinds[0].calls
    for size in divisors(common):
        count = target.size // size
        apart = [_part(target, island, size) for island in target.islands]
        if count > layers or stages not in (None, count) or None in apart:
            continue
        parts = [one for one in apart if one is not None]
        within = {**pinned, MeshAxis.STAGE.value: 1}
        allowed = [[tuple(mesh.items()) for mesh in meshes(one, limits, within)] for one in parts]
        for given in allowed[0]:
            if all(given in others for others in allowed[1:]):
                yield from _of_mesh(profile, plan, target, asked, parts, dict(given))


def _of_mesh(
    profile: ModelProfile,
    plan: Plan,
    target: Target,
    asked: Asked,
    parts: Sequence[Target],
    mesh: Mapping[str, int],
) -> Iterator[Layout]:
    for way in ruled(bare(plan), mesh, limits_of(profile)):
        if not way.stored:
            continue
        base = way.plan()
        try:
            each = {at: OnIsland(profile, base, one) for at, one in enumerate(parts)}
        except PlanError:  # it does not divide the model
            continue
        if not asked.held(profile.infos, each[0].parts):
            continue
        for islands in _orders(target):
            order, positions = _placed(target, islands, parts[0].size)
            yield Layout(
                order=order,
                positions=positions,
                each=each,
                hops=tuple(
                    _link(target, one, other, parts[0].size)
                    for one, other in itertools.pairwise(order)
                ),
                base=base,
                words=way.words,
                target=target,
            )


def _orders(target: Target) -> Iterator[tuple[int, ...]]:
    """Of islands; those that are alike stay as they are."""
    numbers = range(len(target.islands))
    if len(numbers) > _ORDERED:
        yield tuple(numbers)
        return
    seen = []
    for order in itertools.permutations(numbers):
        kinds = tuple(target.islands[at] for at in order)
        if kinds not in seen:
            seen.append(kinds)
            yield order


def _placed(
    target: Target, islands: Sequence[int], size: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Island of each stage, and which of the target's devices it has."""
    counts = [island.size // size for island in target.islands]
    firsts = [sum(counts[:at]) for at in range(len(counts))]
    order = tuple(at for at in islands for _ in range(counts[at]))
    return order, tuple(firsts[at] + n for at in islands for n in range(counts[at]))


def _link(target: Target, one: int, other: int, size: int) -> Link:
    """Between stages that are neighbours; within an island its network, where nodes are crossed."""
    if one != other:
        return target.between
    island = target.islands[one]
    return island.gpu.nvlink if island.nodes == 1 else island.network


def _part(target: Target, island: Island, size: int) -> Target | None:
    """A stage's devices of an island, as a target; None where they fill no whole nodes."""
    gpus = island.gpus
    if size <= gpus:
        shape = (1, size) if gpus % size == 0 else None
    else:
        shape = (size // gpus, gpus) if size % gpus == 0 else None
    if shape is None:
        return None
    part = dataclasses.replace(island, nodes=shape[0], gpus=shape[1])
    return dataclasses.replace(target, islands=(part,))


def search_islands(
    profile: ModelProfile,
    plan: Plan,
    target: Target,
    *,
    rooms: Sequence[float],
    asked: Asked,
) -> tuple[list[tuple[IslandCandidate, Layout]], int]:
    """The fastest of each layout that fits, the fastest first, and how many were scored.

    Args:
        profile: The model.
        plan: See `search`.
        target: Of several islands.
        rooms: Bytes of a device of each.
        asked: What is given or ruled out.

    Raises:
        PlanError: See `check_islands`; no mesh divides the model, its batch and the islands.
    """
    check_islands(profile, target, asked)
    chunks = chunks_of(profile, plan)
    found, scored, divided = [], 0, False
    for layout in layouts(profile, plan, target, asked):
        divided = True
        one, tried = layout.best([MARGIN * room for room in rooms], chunks=chunks)
        scored += tried
        if one is not None:
            found.append((one, layout))
    if not divided:
        told = f" with {asked.shown}" if asked.shown else ""
        raise PlanError(
            f"plan: no mesh of as many devices of each island of '{target.name}'{told} divides"
            f" {profile.rows} rows of {profile.tokens} tokens and the model's heads and widths;"
            f" give another target or number of rows{', or pin less' if told else ''}"
        )
    return sorted(found, key=lambda one: one[0].predicted.seconds.total), scored


def chunks_of(profile: ModelProfile, plan: Plan) -> int:
    """Of the vocabulary: without any the last stage keeps all logits of a microbatch."""
    return max(plan.loss.vocab_chunks, CHUNKS[1]) if profile.vocab else plan.loss.vocab_chunks
