"""Where every parameter lives, as a table for people."""

import html
import math
import zlib
from typing import Any

import jax
from jax.sharding import PartitionSpec

from colossax.config import BoundPlan
from colossax.sharding.rules import home, home_stage, param_sharding, resolve
from colossax.typing import ParamInfo

HEAD = ("parameter", "dims", "shape", "params", "weights", "gradients", "optimizer", "bytes")
ROLES = HEAD[3:7]


def explain(bound: BoundPlan, infos: Any) -> str:
    """Where every parameter lives, as a table: dims, shape, layout and bytes per device.

    Args:
        bound: Plan and mesh.
        infos: Tree with `ParamInfo` leaves.
    """
    rows = [HEAD, *_rows(bound, infos)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([_title(bound), *(line.rstrip() for line in lines)])


def explain_html(bound: BoundPlan, infos: Any) -> str:
    """The table of `explain` for a notebook: a colour for each way to be split.

    Args:
        bound: Plan and mesh.
        infos: Tree with `ParamInfo` leaves.
    """
    head = "".join(f"<th>{name}</th>" for name in HEAD)
    rows = ("<tr>" + "".join(map(_cell, HEAD, row)) + "</tr>" for row in _rows(bound, infos))
    title = html.escape(_title(bound))
    return f"<table><caption>{title}</caption><tr>{head}</tr>{''.join(rows)}</table>"


def _cell(column: str, text: str) -> str:
    colour = ""
    if column in ROLES and text != "whole":
        # Pale in a light notebook and in a dark one, with black letters in both.
        hue = zlib.crc32(text.encode()) % 360
        colour = f' style="background:hsl({hue},65%,85%);color:black"'
    return f"<td{colour}>{html.escape(text)}</td>"


def _title(bound: BoundPlan) -> str:
    mesh = ", ".join(f"{axis}={n}" for axis, n in bound.mesh.shape.items() if n > 1) or "1 device"
    return f"plan {bound.plan.hash} on {mesh}"


def _rows(bound: BoundPlan, infos: Any) -> list[tuple[str, ...]]:
    leaves = jax.tree.leaves(infos, is_leaf=lambda leaf: isinstance(leaf, ParamInfo))
    return [_row(bound, info) for info in leaves]


def _row(bound: BoundPlan, info: ParamInfo) -> tuple[str, ...]:
    # Where stages have programs of their own, one of them holds it.
    at = f"stage {home_stage(bound, info)}: " if bound.stage_programs else ""
    there = home(bound, info)
    specs = [resolve(there, role, info.dims, info.shape, name=info.path) for role in ROLES]
    held = param_sharding(bound, "params", info).shard_shape(info.shape)
    size = math.prod(held) * info.at_rest(bound.plan.precision.params).itemsize
    dims = " ".join(str(dim) for dim in info.dims)
    shape = " ".join(map(str, info.shape))
    return (info.path, dims, shape, *(at + _shown(spec) for spec in specs), f"{size:,}")


def _shown(spec: PartitionSpec) -> str:
    entries = ["x".join(e) if isinstance(e, tuple) else e or "-" for e in spec]
    return " ".join(entries) if any(e != "-" for e in entries) else "whole"
