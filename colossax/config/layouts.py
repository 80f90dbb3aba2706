"""Tensor layouts: what 2d, 2.5d and 3d make of rules that were written for one tensor axis."""

import dataclasses
from collections.abc import Mapping

from colossax.config.axes import RING_AXES, MeshAxis
from colossax.config.frozen import FrozenDict
from colossax.config.rules import Choice, Rules
from colossax.config.words import nearest
from colossax.errors import PlanError

TENSOR_LAYOUTS: tuple[str, ...] = ("1d", "2d", "2.5d", "3d")
TENSOR_MATMULS: tuple[str, ...] = ("auto", "compiler", "gather", "cannon", "overlap")

_FLAT = ("compiler", "overlap", "auto")
"""Ways to multiply over the one axis `tensor`."""


def check_names(layout: str, matmul: str) -> None:
    """Refuse unknown names and pairs that do not exist.

    Raises:
        PlanError: With what would be known.
    """
    if layout not in TENSOR_LAYOUTS:
        raise PlanError(f"plan.tensor_layout: unknown '{layout}'{nearest(layout, TENSOR_LAYOUTS)}")
    if matmul not in TENSOR_MATMULS:
        raise PlanError(f"plan.tensor_matmul: unknown '{matmul}'{nearest(matmul, TENSOR_MATMULS)}")
    if layout == "1d" and matmul not in _FLAT:
        raise PlanError(
            f"plan.tensor_matmul: '{matmul}' multiplies over row and col, tensor_layout is '1d';"
            f" choose tensor_layout 2d, 2.5d or 3d, or one of {', '.join(_FLAT)}"
        )
    if layout != "1d" and matmul == "overlap":
        raise PlanError(
            f"plan.tensor_matmul: 'overlap' is for tensor_layout '1d', found '{layout}';"
            f" choose 'gather' or 'cannon'"
        )
    if layout == "3d" and matmul == "cannon":
        raise PlanError(
            "plan.tensor_matmul: 'cannon' has no third dim, tensor_layout is '3d'; choose 'gather'"
        )


def check_sizes(layout: str, matmul: str, sizes: Mapping[str, int]) -> None:
    """Refuse a mesh that the layout does not use.

    Raises:
        PlanError: With the axes and what would fit.
    """
    large = {axis for axis, size in sizes.items() if size > 1}
    if layout == "1d":
        unusable = sorted(large & {MeshAxis.DEPTH, MeshAxis.ROW, MeshAxis.COL})
        remedy = "give --plan.tensor_layout 2d, 2.5d or 3d, or move their devices to 'tensor'"
    else:
        unusable = sorted(large & {MeshAxis.TENSOR})
        remedy = "move its devices to 'row' and 'col', or give --plan.tensor_layout 1d"
        if layout == "2d" and MeshAxis.DEPTH in large:
            unusable = [MeshAxis.DEPTH.value]
            remedy = "give --plan.tensor_layout 2.5d or 3d, or move its devices to 'data'"
    if unusable:
        shown = ", ".join(f"{axis}={sizes[axis]}" for axis in unusable)
        raise PlanError(f"plan.mesh: tensor_layout '{layout}' has no use for {shown}; {remedy}")
    if matmul == "cannon" and sizes[MeshAxis.ROW] != sizes[MeshAxis.COL]:
        raise PlanError(
            f"plan.tensor_matmul: 'cannon' needs as many rows as columns, found"
            f" row={sizes[MeshAxis.ROW]}, col={sizes[MeshAxis.COL]}; make them equal or choose"
            f" 'gather'"
        )
    _check_ring(sizes)


def _check_ring(sizes: Mapping[str, int]) -> None:
    used = [axis for axis in RING_AXES if sizes[axis] > 1]
    if MeshAxis.RING in used and len(used) > 1:
        shown = ", ".join(f"{axis}={sizes[axis]}" for axis in used)
        raise PlanError(
            f"plan.mesh: found {shown}; a ring is either 'ring' or 'ring_out' x 'ring_in',"
            f" so give one of the two"
        )


def spread(rules: Rules, layout: str, matmul: str) -> Rules:
    """Rules for a tensor layout, from rules that know one tensor axis.

    1d: as they are; where gathers and reductions run under the matmuls, the input of a block stays
    split as the residual stream is (`seq:block`), for the matmul to gather.

    2d and 2.5d: a matrix has its first dim over `row` and its second over `col`; activations have
    rows of the batch over `depth row` and features over `col`. 3d: a matrix from the residual
    stream into a block is `[col depth, row]` and one back `[row depth, col]`; activations
    alternate between batch over `depth row`, features over `col` (the residual stream), and batch
    over `depth col`, features over `row` (inside a block: dims `batch:inner`).

    Axes that split the batch as well stand last in a choice, so that what is left after a gather
    over them is one block.
    """
    if matmul == "overlap" and "seq:residual" in rules.activations:
        return rules.updated(activations={"seq:block": rules.activations["seq:residual"]})
    if layout == "1d":
        return rules
    stored = {
        role: _stored(getattr(rules, role), cube=layout == "3d")
        for role in ("params", "gradients", "optimizer")
    }
    computed = {
        role: _computed(getattr(rules, role), cube=layout == "3d")
        for role in ("activations", "cache")
    }
    return dataclasses.replace(rules, **stored, **computed)


def _stored(rules: Mapping[str, tuple[Choice, ...]], *, cube: bool) -> Mapping:
    wide = (("row", "depth"), ("row",)) if cube else (("row",), ("col",))
    ends = (("col", "depth"), ("col",)) if cube else (("row",), ("col",))
    stored = {dim: _widened(choices, wide) for dim, choices in rules.items()}
    embed = rules.get("embed", ((),))
    stored["embed"] = tuple((*end, *choice) for end in ends for choice in embed)
    return FrozenDict(stored)


def _widened(choices: tuple[Choice, ...], wide: tuple[Choice, ...]) -> tuple[Choice, ...]:
    """Choices for a dim that goes over `tensor`; what it goes over beside that stays in front."""
    split = [choice for choice in choices if "tensor" in choice]
    if not split:
        return choices
    others = tuple(axis for axis in split[0] if axis != "tensor")
    return tuple((*others, *choice) for choice in wide)


def _computed(rules: Mapping[str, tuple[Choice, ...]], *, cube: bool) -> Mapping:
    inner = "row" if cube else "col"

    def turned(choice: Choice) -> Choice:
        return tuple(inner if axis == "tensor" else axis for axis in choice)

    computed = {
        dim: choices if dim.split(":")[0] == "seq" else tuple(map(turned, choices))
        for dim, choices in rules.items()
    }
    if "batch" in rules:
        computed["batch"] = tuple((*choice, "depth", "row") for choice in rules["batch"])
        computed.setdefault("embed", (("col",),))
        if cube:
            computed["batch:inner"] = tuple((*choice, "depth", "col") for choice in rules["batch"])
    return FrozenDict(computed)
