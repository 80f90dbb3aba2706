"""Every mesh of a node, and as many seats on each as memory and latency allow, by formula."""

import dataclasses
from collections.abc import Callable, Iterator

from colossax.aot import Target
from colossax.config import MeshAxis, Plan, Rules
from colossax.errors import PlanError
from colossax.inference.plan import inference_plan, parameters_alone
from colossax.planner.searching.asked import NOTHING_ASKED, Asked
from colossax.planner.searching.meshes import factors
from colossax.planner.searching.search import MARGIN
from colossax.planner.searching.seconds import Rates, rates_of
from colossax.planner.serving.laid import OnServingMesh, ServingBytes, StepSeconds
from colossax.planner.serving.served import ServedProfile

AXES = (
    MeshAxis.STAGE,
    MeshAxis.DATA,
    MeshAxis.FSDP,
    MeshAxis.EXPERT,
    MeshAxis.RING,
    MeshAxis.TENSOR,
)
"""Axes that are searched, outer first."""

MOST_SEATS = 1024
"""Of a replica, where nobody says how many requests there are at once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wish:
    """What is asked of an engine.

    Attributes:
        seats: Requests at once, of all replicas together; None: as many as give most tokens.
        latency_s: Most seconds from one token of a request to its next; None: any.
        of_each: Whether `seats` are those of each replica.
        asked: What is given or ruled out of the mesh.
    """

    seats: int | None = None
    latency_s: float | None = None
    of_each: bool = False
    asked: Asked = NOTHING_ASKED


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingCandidate:
    """A plan with its seats, and what formulas say of it.

    Attributes:
        plan: For `StoredModel.load`.
        replicas: Engines side by side.
        seats: Of each.
        bytes: Of the fullest device.
        seconds: From one token to the next.
    """

    plan: Plan
    replicas: int
    seats: int
    bytes: ServingBytes
    seconds: StepSeconds

    @property
    def all_seats(self) -> int:
        """Requests at once."""
        return self.replicas * self.seats

    @property
    def tokens_per_second(self) -> float:
        """Of all requests, each as long as it may be."""
        return self.all_seats / self.seconds.total

    @property
    def label(self) -> str:
        """For people."""
        sizes = ",".join(f"{axis}={size}" for axis, size in self.plan.mesh.items() if size > 1)
        return f"{sizes or 'one device'} seats={self.all_seats}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoundServing:
    """What a search came to.

    Attributes:
        candidates: One for each mesh on which there is any, most tokens a second first.
        scored: Meshes that divide the model.
        least: Of those what needs least memory, with as few seats as may be; None without any.
        soonest: Of those that fit, what gives a token soonest; None where nothing fits.
    """

    candidates: tuple[ServingCandidate, ...]
    scored: int
    least: ServingCandidate | None
    soonest: ServingCandidate | None


def search_serving(
    profile: ServedProfile,
    plan: Plan,
    target: Target,
    *,
    room: float,
    wish: Wish,
    staged: Callable[[], bool] = lambda: True,
    rates: Rates | None = None,
) -> FoundServing:
    """Score every mesh with the seats that give most tokens a second there.

    More seats read the same weights, so as many as fit and are soon enough give most; of a replica
    with stages, numbers that those share evenly.

    Args:
        profile: The model.
        plan: Precision, experts and kernels, which stay.
        target: Of one node.
        room: Bytes of a device.
        wish: What is asked.
        staged: Whether stages may have parts of the model; asked once, where there are any.
        rates: See `OnServingMesh`.

    Raises:
        PlanError: How fast the target is, is not known.

    Cost: about a millisecond a mesh.
    """
    rates = rates_of(target, inference_plan(plan)) if rates is None else rates
    all_laid = [
        (laid, counts)
        for laid in _laid(profile, plan, target, wish, rates)
        if (counts := counts_of(laid, wish))
    ]
    if any(laid.stages > 1 for laid, _ in all_laid) and not staged():
        all_laid = [one for one in all_laid if one[0].stages == 1]
    few = [candidate(laid, counts[0]) for laid, counts in all_laid]
    fitting = [one for one in few if one.bytes.total <= MARGIN * room]
    found = [
        candidate(laid, best)
        for laid, counts in all_laid
        if (best := most_seats(laid, counts, MARGIN * room, wish.latency_s)) is not None
    ]
    return FoundServing(
        candidates=tuple(sorted(found, key=_rank)),
        scored=len(few),
        least=min(few, key=lambda one: one.bytes.total, default=None),
        soonest=min(fitting, key=lambda one: one.seconds.total, default=None),
    )


def most_seats(
    laid: OnServingMesh, counts: range, room: float, latency_s: float | None
) -> int | None:
    """The most of these that fit and are soon enough; None where none are.

    Both grow with seats, so halves are left out at a time.
    """

    def does(seats: int) -> bool:
        if laid.bytes(seats).total > room:
            return False
        return latency_s is None or laid.seconds(seats).total <= latency_s

    low, high = 0, len(counts)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if does(counts[middle]) else (low, middle)
    return counts[low - 1] if low else None


def candidate(laid: OnServingMesh, seats: int) -> ServingCandidate:
    """With so many seats of each replica."""
    return ServingCandidate(
        plan=laid.plan,
        replicas=laid.replicas,
        seats=seats,
        bytes=laid.bytes(seats),
        seconds=laid.seconds(seats),
    )


def counts_of(laid: OnServingMesh, wish: Wish) -> range:
    """Seats of a replica that may be had there, fewest first; empty where none may."""
    if wish.seats is not None and wish.of_each:
        return range(wish.seats, wish.seats + 1)
    if wish.seats is not None:
        shared = wish.seats % laid.replicas == 0
        return range(wish.seats // laid.replicas, wish.seats // laid.replicas + shared)
    return range(laid.stages, MOST_SEATS + 1, laid.stages)


def _rank(one: ServingCandidate) -> tuple[float, float, int]:
    """Most tokens first; of as many, what needs less memory, and then what has fewer axes."""
    return -one.tokens_per_second, one.bytes.total, len(one.plan.mesh)


def serving_meshes(
    profile: ServedProfile, target: Target, asked: Asked
) -> Iterator[dict[str, int]]:
    """Sizes by axis whose product is the target's devices; those that are pinned are as given."""
    experts = profile.config.mixture is not None
    for sizes in factors(target.size, len(AXES)):
        mesh = {axis.value: size for axis, size in zip(AXES, sizes, strict=True)}
        held = all(mesh.get(axis, 1) == size for axis, size in asked.pinned.items())
        most = profile.config.layers if profile.served.unroll else 1
        many = mesh[MeshAxis.STAGE] > most
        if held and not many and (experts or mesh[MeshAxis.EXPERT] == 1):
            yield mesh


def _laid(
    profile: ServedProfile, plan: Plan, target: Target, wish: Wish, rates: Rates | None
) -> Iterator[OnServingMesh]:
    """On each mesh that divides the model and is what is asked for."""
    base = parameters_alone(plan).replace(rules=Rules())
    for mesh in serving_meshes(profile, target, wish.asked):
        sizes = {axis: size for axis, size in mesh.items() if size > 1} or {"data": 1}
        try:
            laid = OnServingMesh(profile, base.replace(mesh=sizes), target, rates)
            if wish.asked.held(profile.infos, laid.parts):
                yield laid
        except PlanError:
            continue
