"""A target made of islands: its devices in a mesh, which axis crosses what, and the proof of it."""

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from colossax.aot import Link, Place, Target, exchanging, target_devices
from colossax.aot.targets import along
from colossax.config import MESH_AXES, BoundPlan, MeshAxis, Plan
from colossax.errors import PlanError
from colossax.pipeline.islands import island_order

NODE, NODES, ISLANDS = "within a node", "between nodes", "between islands"
"""How far devices are apart, nearest first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reach:
    """What is sent along a mesh axis, or among the devices of a group, crosses this.

    Attributes:
        reach: `NODE`, `NODES` or `ISLANDS`.
        link: Name of the connection.
        island: Name of the island; empty between two.
    """

    reach: str
    link: str
    island: str

    @property
    def shown(self) -> str:
        """For people."""
        where = f" of {self.island}" if self.island and self.reach == NODES else ""
        return f"{self.reach}{where} by {self.link}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Crossing:
    """A mesh axis, or several that a collective runs along together.

    Attributes:
        axis: `fsdp`, or `data x fsdp`.
        size: Devices along it.
        reaches: What it crosses, nearest first.
        groups: Groups of devices that exchange along it, in compiled programs.
        found: What those cross.
    """

    axis: str
    size: int
    reaches: tuple[Reach, ...]
    groups: int = 0
    found: tuple[Reach, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Crossings:
    """Which axis crosses what.

    Attributes:
        axes: Each that is larger than 1, outer first, then what collectives run along together.
        programs: How many were read.
        collectives: In them.
        groups: Of those, all within one island.
    """

    axes: tuple[Crossing, ...]
    programs: int = 0
    collectives: int = 0
    groups: int = 0

    @property
    def lines(self) -> list[str]:
        """For people."""
        rows = ["which axis crosses what:"]
        for one in self.axes:
            reaches = dict.fromkeys(reach.shown for reach in one.reaches)
            told = f"  {one.axis} of {one.size}: {', '.join(reaches)}"
            if one.groups:
                told += f"; in the programs {one.groups} groups, {_told(one.found)}"
            elif one.axis == MeshAxis.STAGE:
                told += "; copies from device to device, and no group in any program"
            rows.append(told)
        rows.append(
            f"read in {self.programs} compiled programs: {self.collectives} collectives,"
            f" {self.groups} groups of devices, each within one island"
        )
        return rows

    def to_json(self) -> dict[str, Any]:
        """As plain JSON types."""
        return dataclasses.asdict(self)


def island_devices(plan: Plan, target: Target) -> list[jax.Device]:
    """The target's devices in an order that fills the plan's mesh.

    Of a target of islands no axis but `stage` leaves an island.

    Raises:
        InputError: The CUDA compiler plugin is missing.
        PlanError: The mesh does not fit the target, or there is no such order.
    """
    devices = target_devices(target)
    return [devices[number] for number in _given_numbers(plan, target)]


def device_numbers(plan: Plan, target: Target) -> tuple[int, ...]:
    """Numbers of the target's devices as they lie in the plan's mesh.

    As `island_devices` gives them to `bind`, which exchanges stages by `pipeline.order`.
    """
    numbers = _given_numbers(plan, target)
    order = plan.pipeline.order
    if not isinstance(order, tuple):
        return numbers
    each = _stage_size(plan, target)
    return tuple(number for at in order for number in numbers[at * each : (at + 1) * each])


def _given_numbers(plan: Plan, target: Target) -> tuple[int, ...]:
    """Numbers of the target's devices in the order of `island_devices`."""
    if not target.mixed:
        return tuple(range(target.size))
    names = {number: island.name for number, island in enumerate(target.islands)}
    islands = [place.island for place in target.places]
    return island_order(plan.mesh_sizes(target.size), islands, names)


def _stage_size(plan: Plan, target: Target) -> int:
    """Devices of a stage."""
    return target.size // plan.mesh_sizes(target.size)[MeshAxis.STAGE]


def stage_devices(plan: Plan, target: Target, stage: int) -> tuple[int, ...]:
    """Numbers of the target's devices that a stage has."""
    each = _stage_size(plan, target)
    return device_numbers(plan, target)[stage * each : (stage + 1) * each]


def stage_target(plan: Plan, target: Target, stage: int) -> Target:
    """The island that a stage is in, as a target of its own."""
    first = stage_devices(plan, target, stage)[0]
    return target.apart[target.places[first].island]


def device_places(bound: BoundPlan, target: Target) -> dict[jax.Device, Place]:
    """Where each device of a mesh is, by `device_numbers`.

    Raises:
        RuntimeError: A device is of another kind than its island's: a fault of this library.
    """
    numbers = device_numbers(bound.plan, target)
    places = {
        device: target.places[number]
        for device, number in zip(bound.mesh.devices.flat, numbers, strict=True)
    }
    for device, place in places.items():
        island = target.islands[place.island]
        if device.device_kind != island.gpu.name:
            raise RuntimeError(f"{device} is in the place of a device of island '{island.name}'")
    return places


def stage_link(plan: Plan, target: Target, origin: int, end: int) -> Link:
    """The slowest link over which devices of a stage send to those of another.

    Args:
        plan: Whose stages they are.
        target: Whose devices they have.
        origin: Stage that sends.
        end: Stage that gets it.
    """
    both = (stage_devices(plan, target, stage) for stage in (origin, end))
    pairs = zip(*both, strict=True)
    links = [target.link_among({target.places[at] for at in pair}) for pair in pairs]
    return min(links, key=lambda link: link.bytes_per_s)


def mesh_crossings(plan: Plan, target: Target) -> Crossings:
    """Which axis of a plan's mesh crosses what; along `stage`, what lies between neighbours."""
    places = [target.places[number] for number in device_numbers(plan, target)]
    sizes = plan.mesh_sizes(target.size)
    shape = [sizes[axis] for axis in MESH_AXES]
    axes = []
    for dim, axis in enumerate(MESH_AXES):
        if sizes[axis] == 1:
            continue
        groups: Sequence[Sequence[int]] = along(shape, [dim])
        if axis == MeshAxis.STAGE:
            groups = [pair for group in groups for pair in _sent(group, plan)]
        reaches = _reaches(target, ({places[at] for at in group} for group in groups))
        axes.append(Crossing(axis=axis, size=sizes[axis], reaches=reaches))
    return Crossings(axes=tuple(axes))


def _sent(stages: Sequence[int], plan: Plan) -> list[tuple[int, int]]:
    """Neighbours; with several chunks the last stage sends to the first, but in a V."""
    pairs = list(itertools.pairwise(stages))
    around = plan.pipeline.chunks_of_stage > 1 and plan.pipeline.resolved != "zb_v"
    return [*pairs, (stages[-1], stages[0])] if around else pairs


def proved(
    crossings: Crossings,
    target: Target,
    programs: Iterable[tuple[str, str, Mesh]],
    place_of: Mapping[jax.Device, Place],
) -> Crossings:
    """With what the groups of devices in compiled programs cross.

    Args:
        crossings: Of the plan's mesh.
        target: Whose devices it has.
        programs: Of each its name, its text and the mesh it was compiled for.
        place_of: Of the target's devices.

    Raises:
        RuntimeError: A group has devices of several islands: a fault of this library.
        ValueError: Groups in a program are not understood.
    """
    found: dict[str, list[set[Place]]] = collections.defaultdict(list)
    sizes: dict[str, int] = {}
    read, counted = 0, 0
    known_texts: dict[str, list[Any]] = {}
    for name, text, mesh in programs:
        read += 1
        places = [place_of[device] for device in mesh.devices.flat]
        if text not in known_texts:
            known_texts[text] = list(exchanging(text, mesh))
        for kind, axes, groups in known_texts[text]:
            counted += 1
            for group in groups:
                among = {places[at] for at in group}
                _check_within(target, among, f"{name}: {kind} among devices {group}")
                axis = " x ".join(axes) or f"groups of {len(group)}"
                sizes[axis] = len(group)
                found[axis].append(among)
    known = {one.axis for one in crossings.axes}
    more = [
        Crossing(axis=axis, size=sizes[axis], reaches=_reaches(target, among))
        for axis, among in found.items()
        if axis not in known
    ]
    return Crossings(
        axes=tuple(
            dataclasses.replace(
                one, groups=len(found[one.axis]), found=_reaches(target, found[one.axis])
            )
            for one in (*crossings.axes, *more)
        ),
        programs=read,
        collectives=counted,
        groups=sum(map(len, found.values())),
    )


def check_one_island(target: Target, what: str) -> None:
    """Refuse a target of islands for what is done for one.

    Raises:
        PlanError: It has several.
    """
    if target.mixed:
        raise PlanError(
            f"{what}: it is for GPUs of one kind and network, and target '{target.name}' is made of"
            f" islands; give one of them, as --target {target.islands[0].name}"
        )


def check_programs_apart(plan: Plan, target: Target) -> None:
    """Refuse a target of islands for a plan whose stages share one program.

    Raises:
        PlanError: It is one.
    """
    if target.mixed and plan.pipeline.cuts is None:
        raise PlanError(
            f"plan.pipeline.cuts: target '{target.name}' is made of islands, and without cuts all"
            " stages have one program, which no GPU of another kind runs; give"
            " --plan.pipeline.cuts auto, and each stage has one for its island"
        )


def _check_within(target: Target, among: set[Place], where: str) -> None:
    islands = sorted({place.island for place in among})
    if len(islands) > 1:
        shown = " and ".join(f"'{target.islands[one].name}'" for one in islands)
        raise RuntimeError(f"{where}: a collective crosses islands {shown}, which none may")


def _reaches(target: Target, groups: Iterable[set[Place]]) -> tuple[Reach, ...]:
    """What groups of devices cross, each once, nearest first."""
    found = {_reach(target, among) for among in groups}
    order = (NODE, NODES, ISLANDS)
    return tuple(sorted(found, key=lambda one: (order.index(one.reach), one.island)))


def _reach(target: Target, among: set[Place]) -> Reach:
    link: Link = target.link_among(among)
    islands = {place.island for place in among}
    if len(islands) > 1:
        return Reach(reach=ISLANDS, link=link.name, island="")
    reach = NODE if len(among) == 1 else NODES
    return Reach(reach=reach, link=link.name, island=target.islands[min(islands)].name)


def _told(reaches: Sequence[Reach]) -> str:
    return " and ".join(dict.fromkeys(one.reach for one in reaches))
