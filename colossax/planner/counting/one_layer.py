"""A layer of a loss that was cut at its stack, alone: its shapes, and both ways through it."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from colossax.layerwise import CutRun, Layer, shapes_of
from colossax.planner.counting.traced_flops import traced_flops


def row_shapes(run: CutRun, args: Sequence[Any]) -> Any:
    """Shapes of the parameters of one call of a run, by the loss's arguments."""
    rows = jax.eval_shape(run.params, *args)
    return jax.tree.map(lambda x: _row(x, run.layers.stacked), rows)


def traced_layer(run: CutRun, row: Any, carry: Any, side: Any, *, recomputed: bool = True) -> Layer:
    """A run's layer; `recomputed` as its policy says, else it keeps all that backward needs."""

    def apply(row: Any, carry: Any, side: Any, number: Array) -> Any:
        carry, _, sums = run.layers.apply(row, carry, side, run.layers.state(number))
        return carry, sums

    return Layer(run.layers.checkpoint(apply) if recomputed else apply, row, carry, side)


def both_ways(layer: Layer, number: int, inputs: Any, side: Any) -> Any:
    """A layer's output and the gradients of `inputs`, parameters and carry."""
    row, carry = inputs
    at = jnp.int32(number)
    out, kept = layer.forward(row, carry, side, at)
    ones = jax.tree.map(_cotangent, out)
    found = layer.transpose(row, side, at, kept, ones)
    return out[0], found.params, found.carry


def layer_flops(layer: Layer, params: Any, carry: Any, side: Any) -> float:
    """Of a layer, forward and backward."""

    def both(params: Any, carry: Any, side: Any) -> Any:
        return both_ways(layer, 0, (params, carry), side)

    return float(traced_flops(jax.make_jaxpr(both)(*shapes_of((params, carry, side)))).flops)


def _cotangent(x: Array) -> Any:
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.ones_like(x)
    return jnp.zeros(x.shape, jax.dtypes.float0)


def _row(x: jax.ShapeDtypeStruct, stacked: bool) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape[1:] if stacked else x.shape, x.dtype)
