"""A plan on devices."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from colossax.config.axes import MESH_AXES, MeshAxis
from colossax.config.plan import Plan
from colossax.config.rules import Rules
from colossax.errors import PlanError


@dataclasses.dataclass(frozen=True)
class BoundPlan:
    """A plan and the mesh it runs on; several may live side by side, each on its own devices.

    Attributes:
        plan: The plan.
        mesh: Every mesh axis in order, those not in use with size 1, all of axis type Auto.
    """

    plan: Plan
    mesh: Mesh

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.plan, self.mesh))

    def __hash__(self) -> int:
        return self._hash  # asked for at every traced call

    def size(self, axes: Sequence[str]) -> int:
        """Devices along these mesh axes together."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    @property
    def rules(self) -> Rules:
        """The plan's rules as its tensor layout turns them."""
        return self.plan.effective_rules

    @property
    def single(self) -> bool:
        """Whether the mesh is one device, so that every constraint is the identity."""
        return self.mesh.size == 1

    @property
    def stage_programs(self) -> bool:
        """Whether each stage has a program of its own, on its devices alone."""
        return self.plan.pipeline.cuts is not None and self.mesh.shape[MeshAxis.STAGE] > 1

    def stage(self, number: int) -> "BoundPlan":
        """The devices of one stage, under the same plan."""
        return self.part(MeshAxis.STAGE, number)

    def part(self, axis: str, number: int) -> "BoundPlan":
        """The devices at one place of a mesh axis, under the same plan."""
        return _part(self, str(axis), number)

    def replace(self, **changes) -> "BoundPlan":
        """The same devices under a plan with these fields replaced."""
        return dataclasses.replace(self, plan=self.plan.replace(**changes))


@functools.lru_cache(maxsize=256)
def _part(bound: BoundPlan, axis: str, number: int) -> BoundPlan:
    grid = np.take(bound.mesh.devices, [number], axis=MESH_AXES.index(axis))
    sizes = {**bound.mesh.shape, axis: 1}
    return BoundPlan(
        bound.plan.replace(mesh={axis: n for axis, n in sizes.items() if n > 1}),
        Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES)),
    )


def bind(plan: Plan, devices: Sequence[jax.Device] | None = None) -> BoundPlan:
    """Build the mesh of `plan` on `devices` (default: all that JAX sees).

    Devices fill the mesh in their order, so the innermost axis (`tensor`) gets neighbours; those of
    one stage may change places with another's (`pipeline.order`).

    Raises:
        PlanError: The mesh sizes do not multiply to the number of devices, or the order is of
            another number of stages.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = plan.mesh_sizes(len(devices))
    grid = np.asarray(devices, dtype=object).reshape([sizes[axis] for axis in MESH_AXES])
    order, stages = plan.pipeline.order, sizes[MeshAxis.STAGE]
    if isinstance(order, tuple) and stages > 1:
        if len(order) != stages:
            raise PlanError(
                f"plan.pipeline.order: found {len(order)} numbers for {stages} stages; give each"
                f" number from 0 to {stages - 1} once, or leave it out (none)"
            )
        grid = np.take(grid, order, axis=MESH_AXES.index(MeshAxis.STAGE))
    return BoundPlan(plan, Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES)))
