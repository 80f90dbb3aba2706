"""What a layer's matmuls send in each tensor layout, by formula.

With p devices in all, of these t along `tensor` or d, r, c along `depth row col`, f over which
weights are stored and g others; M tokens of all devices; widths e (inputs of the maps into blocks,
each input once), i (their outputs), o (inputs of the maps out of blocks), u (their outputs); W
parameters. Items sent per device, forward and backward, operands gathered again in backward:

| layout | activations, M/p times | weights |
|---|---|---|
| 1d | `2 (t-1) (e + u)` | `3 (f-1) W/p' + 2 (g-1)/g W/p'`, p' = f t |
| 1d, sequence split | `(t-1) (3e + 2u)` | the same |
| 2d, 2.5d | `3 (c-1) (e + o)` | `3 (rf-1) W/p' + 2 (gd-1)/(gd) W/p'`, p' = f r c |
| 2d, 2.5d, cannon | `3 r (e + o)` | `3 (rf + f-1) W/p' + 2 (gd-1)/(gd) W/p'` |
| 3d | `(r-1) (3e + 2u) + (c-1) (2i + 3o)` | `3 (df-1) W/p' + 2 (g-1)/g W/p'`, p' = f d r c |

A GPT layer of width H, F = 4H, has e = 2H, i = 7H, o = 5H, u = 2H, W = 12 H^2. Then 1d sends `8 M H
(p-1)/p`, with the sequence split 10, 2d on q x q devices `3 (q-1)/p (7 M H + 12 H^2)`.
tests/sharding/matmul/test_bytes.py counts all of them in compiled programs.
"""

import dataclasses

from colossax.config import BoundPlan
from colossax.sharding.rules import activation_axes, resolve


@dataclasses.dataclass(frozen=True, kw_only=True)
class Widths:
    """Sums over a layer's matmuls.

    Attributes:
        into_in: Widths of the inputs of the maps into a block; q, k and v share one.
        into_out: Widths of their outputs.
        out_in: Widths of the inputs of the maps out of a block.
        out_out: Widths of their outputs.
        weights: Parameters.
    """

    into_in: int
    into_out: int
    out_in: int
    out_out: int
    weights: int


def sent_items(bound: BoundPlan, tokens: int, widths: Widths, *, kept: bool = False) -> float:
    """Items that a device sends for the matmuls of a layer, forward and backward.

    Devices that share a sequence count as those along `fsdp` where the plan splits weights over
    them, else as those along `data`: they sum the gradients of the weights.

    Args:
        bound: Plan and mesh; its rules are those of a preset.
        tokens: Of all devices together.
        widths: Of the layer's matmuls, biases apart.
        kept: Backward gets what forward gathered; all 3 of the table are then 2, but for the
            rings of Cannon's algorithm, which keep nothing.
    """
    again = 2 if kept else 3
    moved = _activations(bound, widths, again) * tokens / bound.mesh.size
    size = bound.mesh.shape
    cannon = bound.plan.tensor_matmul == "cannon"
    matrix = ("tensor",) if bound.plan.tensor_layout == "1d" else ("row", "col")
    gathered = () if cannon else ("row",)
    if bound.plan.tensor_layout == "3d":
        matrix, gathered = ("depth", "row", "col"), ("depth",)
    stored = tuple(axis for axis in _stored(bound) if axis not in ("row", "col", "depth"))
    f = bound.size(stored)
    held = widths.weights / (f * bound.size(matrix))
    summed = bound.mesh.size // (f * bound.size(matrix))
    moved += again * (f * bound.size(gathered) - 1) * held
    if cannon:
        moved += 3 * size["row"] * f * held
    return moved + 2 * (summed - 1) / summed * held


def _stored(bound: BoundPlan) -> tuple[str, ...]:
    """Axes of size above 1 over which the plan stores the width of the residual stream."""
    entry = resolve(bound, "params", ("embed",), (bound.mesh.size,))[0]
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _activations(bound: BoundPlan, widths: Widths, again: int) -> int:
    """Items sent per token that a device holds, by a scheme that gathers `again` times less one."""
    size, layout = bound.mesh.shape, bound.plan.tensor_layout
    ends = again * widths.into_in + 2 * widths.out_out
    if layout == "1d":
        if "tensor" in activation_axes(bound, "seq:residual"):
            return (size["tensor"] - 1) * ends
        return (size["tensor"] - 1) * 2 * (widths.into_in + widths.out_out)
    if layout == "3d":
        within = 2 * widths.into_out + again * widths.out_in
        return (size["row"] - 1) * ends + (size["col"] - 1) * within
    if bound.plan.tensor_matmul == "cannon":
        return 3 * size["row"] * (widths.into_in + widths.out_in)
    return again * (size["col"] - 1) * (widths.into_in + widths.out_in)
