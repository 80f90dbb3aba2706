"""Where the operands of a matmul lie at rest and where it multiplies them, by a plan's rules.

A map is `y[b, s, *out] = x[b, s, *in] @ w[*in, *out] + bias[*out]`; several maps may share x.

- w at rest has role `params`; multiplied, role `weights`: gathered along axes that split the batch.
- x at rest is `batch seq:residual embed`, or `batch:inner seq *in` where no dim of it is `embed`;
  multiplied, its features are split as w's and its tokens as at rest, less the axes of any w.
- y is multiplied with tokens as x's and features as w's; at rest it is as x, by its own dims.

The product is partial over the axes of w's contracted dims (k axes), the gradient of x over those
of its other dims (n axes), that of w over those of the tokens. What follows for the layouts, with
the rules of `colossax.config.layouts`, for a map into a block and for one out of it:

| layout | w multiplied | x gathered over | y summed over |
|---|---|---|---|
| 1d | `[-, tensor]`, `[tensor, -]` | - | -, tensor |
| 1d, sequence split between blocks | the same | tensor (seq), - | -, tensor (seq) |
| 2d, 2.5d | `[-, col]` both | col (features) | - |
| 3d | `[col, row]`, `[row, col]` | row (batch), col (batch) | col (batch), row (batch) |
"""

import dataclasses
from collections.abc import Sequence

from colossax.config import BoundPlan
from colossax.errors import PlanError
from colossax.sharding.matmul.splits import (
    Axes,
    Split,
    axes_of,
    check_nested,
    nested,
    shared,
    split_of,
    without,
)
from colossax.sharding.rules import resolve
from colossax.typing import Dims


@dataclasses.dataclass(frozen=True, kw_only=True)
class MapLayout:
    """Splits of one map: its weight, bias and output.

    Attributes:
        w_rest: The weight as it is kept, `[*in, *out]`.
        w_used: As it is multiplied.
        w_grad: Where its gradient is wanted.
        bias_rest: The bias as it is kept, `[*out]`.
        bias_grad: Where its gradient is wanted.
        y_used: The output as it is computed, `[b, s, *out]`.
        y_rest: As it is handed on.
        k_axes: Axes over which the output is partial.
        n_axes: Axes over which the gradient of x is partial.
    """

    w_rest: Split
    w_used: Split
    w_grad: Split
    bias_rest: Split
    bias_grad: Split
    y_used: Split
    y_rest: Split
    k_axes: Axes
    n_axes: Axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Splits of several maps of one x `[b, s, *in]`.

    Attributes:
        bound: Plan and mesh.
        contract: How many dims `*in` are.
        x_rest: The input as it arrives.
        x_used: As it is multiplied.
        maps: One per weight.
    """

    bound: BoundPlan
    contract: int
    x_rest: Split
    x_used: Split
    maps: tuple[MapLayout, ...]


def layout_of(
    bound: BoundPlan,
    x_shape: Sequence[int],
    maps: Sequence[tuple[tuple[int, ...], Dims]],
    contract: int,
) -> Layout:
    """The layout of maps with weights of these shapes and dims on an x `[b, s, *in]`.

    Raises:
        PlanError: A size is not a multiple of the devices of its axes, or the rules put blocks
            where no gather and no reduction of neighbours leads.
    """
    used = [_resolved(bound, "weights", dims, shape) for shape, dims in maps]
    features = used[0][:contract]
    for (_, dims), split in zip(maps, used, strict=True):
        if split[:contract] != features:
            raise PlanError(
                f"linears: weight {dims} is contracted over mesh axes {split[:contract]}, another"
                f" of the same input over {features}; give the maps one call each"
            )
    lead = tuple(x_shape[:2])
    x_rest = _at_rest(bound, maps[0][1][:contract], x_shape)
    tokens = without(x_rest[:2], {axis for split in used for axis in axes_of(split)})
    rests = [_at_rest(bound, d[contract:], (*lead, *shape[contract:])) for shape, d in maps]
    for rest in rests:
        tokens = _meeting(tokens, rest[:2])
    x_used = (*tokens, *features)
    check_nested(x_rest, x_used, name=f"input {maps[0][1][:contract]}")
    layouts = (
        _map_layout(bound, shape, dims, split, (*tokens, *split[contract:]), rest)
        for (shape, dims), split, rest in zip(maps, used, rests, strict=True)
    )
    return Layout(bound=bound, contract=contract, x_rest=x_rest, x_used=x_used, maps=tuple(layouts))


def _meeting(tokens: Split, rest: Split) -> Split:
    """Tokens as multiplied, gathered further where their blocks do not nest with the output's.

    So it is in 3d where a block's output is whole along `row`: its batch lies over `col` instead.
    """
    return tuple(
        one if nested((one,), (other,)) else shared(one, other)
        for one, other in zip(tokens, rest, strict=True)
    )


def _map_layout(
    bound: BoundPlan, shape: tuple[int, ...], dims: Dims, used: Split, y_used: Split, y_rest: Split
) -> MapLayout:
    contract = len(dims) - len(y_used) + 2
    out_shape, out = shape[contract:], dims[contract:]
    layout = MapLayout(
        w_rest=_resolved(bound, "params", dims, shape),
        w_used=used,
        w_grad=_resolved(bound, "gradients", dims, shape),
        bias_rest=_resolved(bound, "params", out, out_shape),
        bias_grad=_resolved(bound, "gradients", out, out_shape),
        y_used=y_used,
        y_rest=y_rest,
        k_axes=axes_of(used[:contract]),
        n_axes=axes_of(used[contract:]),
    )
    check_nested(layout.w_rest, layout.w_used, name=f"weight {dims}")
    check_nested(layout.w_used, layout.w_grad, name=f"gradient of weight {dims}")
    check_nested(layout.y_used, layout.y_rest, name=f"output {out}")
    return layout


def _at_rest(bound: BoundPlan, dims: Dims, shape: Sequence[int]) -> Split:
    """An activation outside of the matmul: in the residual stream, or inside a block."""
    lead = ("batch", "seq:residual") if "embed" in dims else ("batch:inner", "seq")
    return _resolved(bound, "activations", (*lead, *dims), shape)


def _resolved(bound: BoundPlan, role: str, dims: Dims, shape: Sequence[int]) -> Split:
    return split_of(resolve(bound, role, dims, shape, name=f"linear {dims}"))
