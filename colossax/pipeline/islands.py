"""Which devices of unequal islands a mesh gets, so that nothing but its stages crosses them."""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from colossax.config import MeshAxis
from colossax.errors import PlanError


def island_order(
    sizes: Mapping[str, int],
    islands: Sequence[Hashable],
    names: Mapping[Any, str] | None = None,
) -> tuple[int, ...]:
    """Devices in an order that fills a mesh so that no axis but `stage` leaves an island.

    Devices that differ along other axes are connected by those, step by step: all of a stage are of
    one island, or some axis crosses. So such an order exists where the devices of each island are a
    multiple of those of a stage. Islands come in the order of their first device, the stages of
    each one after another: as few stages as can be send to another island.

    Args:
        sizes: Of the mesh axes, outer first, `stage` the outermost; their product is the number
            of devices.
        islands: Of each device, which it is of.
        names: Of islands, for people.

    Returns:
        Numbers of the devices.

    Raises:
        PlanError: There is no such order; with the reason.

    Cost: O(devices).
    Source: Holmes, arXiv:2312.03549: groups within one kind of network, stages across.
    """
    members: dict[Hashable, list[int]] = {}
    for number, island in enumerate(islands):
        members.setdefault(island, []).append(number)
    stages = sizes.get(MeshAxis.STAGE, 1)
    if len(members) > 1:
        _check(sizes, stages, len(islands) // stages, members, names or {})
    return tuple(number for devices in members.values() for number in devices)


def _check(
    sizes: Mapping[str, int],
    stages: int,
    each: int,
    members: Mapping[Hashable, Sequence[int]],
    names: Mapping[Any, str],
) -> None:
    """Refuse a mesh whose stages are not each within an island."""
    counts = [(names.get(key, str(key)), len(devices)) for key, devices in members.items()]
    uneven = [(name, count) for name, count in counts if count % each]
    if not uneven:
        return
    split = ",".join(f"{axis}={n}" for axis, n in sizes.items() if n > 1 and axis != "stage")
    most = math.gcd(*(count for _, count in counts))
    devices = "1 device" if most == 1 else f"{most} devices"
    remedy = f"stage={stages * each // most}, so that a stage has {devices}, or more stages"
    if stages == 1:
        raise PlanError(
            f"plan.mesh {split}: it crosses {len(counts)} islands"
            f" ({', '.join(f'{name}: {n} devices' for name, n in counts)}), which"
            f" axis 'stage' alone may, and that has size 1; give {remedy}, or one of the islands"
        )
    name, count = uneven[0]
    raise PlanError(
        f"plan.mesh: a stage has {each} devices ({split}), and the {count} of island"
        f" '{name}' are no multiple of them, so that another axis than 'stage' would cross"
        f" islands; give {remedy}"
    )
