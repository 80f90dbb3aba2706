"""Which mesh axes the experts of a mixture are split over, by a plan."""

import itertools
import math
from collections.abc import Mapping

from colossax.config import GROUP_AXES, BoundPlan, ExpertsConfig, MeshAxis


def expert_group(bound: BoundPlan, experts: int) -> tuple[str, ...]:
    """Mesh axes of size above 1 over which so many experts are split, outer first.

    Those of `plan.experts.group`; where it leaves them out, of the axes that may, with `expert`,
    those that have most devices among the numbers that divide the experts.

    Raises:
        PlanError: The devices of the group do not divide the experts.
    """
    return group_of(bound.plan.experts, bound.mesh.shape, experts)


def group_of(asked: ExpertsConfig, sizes: Mapping[str, int], experts: int) -> tuple[str, ...]:
    """The same of sizes by mesh axis; see `expert_group`."""
    if asked.dispatch == "weights":
        return ()
    usable = tuple(axis for axis in GROUP_AXES if sizes.get(axis, 1) > 1)
    if asked.group is not None:
        return tuple(axis for axis in usable if axis in asked.group)
    held = tuple(axis for axis in usable if axis == MeshAxis.EXPERT)
    others = tuple(axis for axis in usable if axis != MeshAxis.EXPERT)
    groups = [
        (*held, *more)
        for count in range(len(others) + 1)
        for more in itertools.combinations(others, count)
    ]

    def size(group: tuple[str, ...]) -> int:
        return math.prod(sizes[axis] for axis in group)

    fitting = [group for group in groups if experts % size(group) == 0]
    # Where not even `expert` divides them, what names the array says so.
    return max(fitting, key=size, default=held)
