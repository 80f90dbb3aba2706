"""How a plan's rules split arrays on a mesh that is nothing but sizes."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from colossax.config import MESH_AXES, BoundPlan, MeshAxis, Plan, Rules
from colossax.planner.searching.sent import Sent
from colossax.sharding import resolve
from colossax.sharding.rules import (
    TABLE_WIDTH,
    choose,
    dividing,
    fit,
    gathered_axes,
    optional_axes,
)
from colossax.typing import Dims


def abstract(plan: Plan, devices: int) -> BoundPlan:
    """A plan on a mesh without devices, for what asks for sizes alone.

    Raises:
        PlanError: Its mesh is not of this many devices.
    """
    sizes = plan.mesh_sizes(devices)
    types = (AxisType.Auto,) * len(MESH_AXES)
    mesh: Any = AbstractMesh(tuple(sizes[axis] for axis in MESH_AXES), MESH_AXES, axis_types=types)
    return BoundPlan(plan, mesh)


class Parts:
    """Splits of arrays under one mesh.

    Attributes:
        bound: The plan and its sizes.
        split: Axes of size above 1 that split tokens.
        experts: What is sent of a token to its experts, by the parameters of a kind of layers, as
            far as it was asked for.
    """

    def __init__(self, bound: BoundPlan, choices: "Choices | None" = None):
        """Args:
        bound: The plan and its sizes.
        choices: Of the plan's rules, where many meshes share them.
        """
        self.bound = bound
        self.split = gathered_axes(bound)
        self.experts: dict[tuple[int, ...], tuple[Sent, ...]] = {}
        self._sizes = dict(bound.mesh.shape)
        self._choices = Choices(bound.rules) if choices is None else choices
        self._known: dict[tuple[str, Dims, tuple[int, ...]], tuple[str, ...]] = {}

    def axes(self, role: str, dims: Dims, shape: Sequence[int]) -> tuple[str, ...]:
        """Mesh axes over which an array is split; see `resolve`.

        Raises:
            PlanError: They do not divide it.
        """
        key = (role, dims, tuple(shape))
        if key not in self._known:
            self._known[key] = self._split(*key)
        return self._known[key]

    def own(self, role: str, dims: Dims, shape: Sequence[int]) -> tuple[str, ...]:
        """Axes over which one layer of a stack is split, or what is of no layer: not those that
        give layers to stages.

        Raises:
            PlanError: See `axes`.
        """
        axes = self.axes(role, dims, shape)
        if "layers" not in dims:
            return axes
        return tuple(axis for axis in axes if axis != MeshAxis.STAGE)

    def whole(self, dims: Dims, shape: Sequence[int]) -> tuple[str, ...]:
        """Axes over which a parameter is split where it is multiplied; of experts each device has
        its own.

        Raises:
            PlanError: See `axes`.
        """
        found = self.own("weights", dims, shape)
        return found + tuple(axis for axis in self.group(dims, shape) if axis not in found)

    def group(self, dims: Dims, shape: Sequence[int]) -> tuple[str, ...]:
        """Axes over which experts are split, of an array that has a dim of them."""
        if "experts" not in dims:
            return ()
        return self.axes("params", ("experts",), (shape[dims.index("experts")],))

    def size(self, axes: Sequence[str]) -> int:
        """Devices along these together."""
        return math.prod(self._sizes[axis] for axis in axes)

    def _split(self, role: str, dims: Dims, shape: tuple[int, ...]) -> tuple[str, ...]:
        # What depends on sizes beside its own rule goes the long way.
        if "experts" in dims or TABLE_WIDTH in dims:
            return tuple(jax.tree.leaves(tuple(resolve(self.bound, role, dims, shape))))
        return self._choices.axes(self.bound, role, dims, shape)


class Choices:
    """What a plan's rules choose for dims, for many meshes: it does not depend on their sizes.

    But for experts, and for tables that are nothing but looked up; those are for `resolve`.
    """

    def __init__(self, rules: Rules):
        self._rules = rules
        self._known: dict[tuple[str, Dims], list[tuple[str, ...]]] = {}

    def axes(
        self, bound: BoundPlan, role: str, dims: Dims, shape: Sequence[int]
    ) -> tuple[str, ...]:
        """Mesh axes over which an array is split; as `resolve`, many times as fast.

        Raises:
            PlanError: See `resolve`.
        """
        key = (role, dims)
        if key not in self._known:
            rules = getattr(self._rules, "params" if role == "weights" else role)
            self._known[key] = _choices(rules, dims)
        drop = gathered_axes(bound) if role == "weights" else frozenset[str]()
        sizes, found = bound.mesh.shape, list[str]()
        for dim, size, choice in zip(dims, shape, self._known[key], strict=True):
            axes = tuple(axis for axis in choice if sizes[axis] > 1 and axis not in drop)
            if axes:
                axes = dividing(bound, axes, size, optional_axes(role, dim))
                entry = fit(bound, axes, dim, size, "array")
                found += [entry] if isinstance(entry, str) else list(entry or ())
        return tuple(found)


def _choices(rules: Mapping, dims: Dims) -> list[tuple[str, ...]]:
    """Of each dim the first choice that is free."""
    taken: set[str] = set()
    found = []
    for dim in dims:
        found.append(choose(rules, dim, taken))
        taken.update(found[-1])
    return found
