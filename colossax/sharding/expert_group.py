"""Which mesh axes the experts of a mixture are split over, by a plan."""

import itertools

from colossax.config import GROUP_AXES, BoundPlan, MeshAxis


def expert_group(bound: BoundPlan, experts: int) -> tuple[str, ...]:
    """Mesh axes of size above 1 over which so many experts are split, outer first.

    Those of `plan.experts.group`; where it leaves them out, of the axes that may, with `expert`,
    those that have most devices among the numbers that divide the experts.

    Raises:
        PlanError: The devices of the group do not divide the experts.
    """
    asked = bound.plan.experts
    if asked.dispatch == "weights":
        return ()
    usable = tuple(axis for axis in GROUP_AXES if bound.mesh.shape[axis] > 1)
    if asked.group is not None:
        return tuple(axis for axis in usable if axis in asked.group)
    held = tuple(axis for axis in usable if axis == MeshAxis.EXPERT)
    others = tuple(axis for axis in usable if axis != MeshAxis.EXPERT)
    groups = [
        (*held, *more)
        for count in range(len(others) + 1)
        for more in itertools.combinations(others, count)
    ]
    fitting = [group for group in groups if experts % bound.size(group) == 0]
    # Where not even `expert` divides them, what names the array says so.
    return max(fitting, key=bound.size, default=held)
