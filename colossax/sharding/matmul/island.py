"""Matmuls of a plan's layout in regions of our own, manual over the whole mesh.

Nothing here is left to the compiler's partitioner: what is gathered, summed and scattered is what
`layout` says. The rule for derivatives stands outside of the regions, so that no gradient is
summed twice.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from colossax.sharding.matmul.layout import Layout, MapLayout
from colossax.sharding.matmul.splits import (
    Axes,
    Split,
    axes_of,
    move_local,
    nested,
    spec_of,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Island:
    """What is known of a matmul before it is traced.

    Attributes:
        layout: Where everything lies.
        summed: Dtype in which devices sum the gradients of weights and biases.
        keep: Whether backward gets gathered operands instead of gathering again.
    """

    layout: Layout
    summed: jnp.dtype
    keep: bool


Biases = tuple[Array | None, ...]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def matmuls(
    island: Island, x: Array, weights: tuple[Array, ...], biases: Biases
) -> tuple[Array, ...]:
    """`x @ w + bias` for each of several weights, x gathered once.

    Args:
        island: Layout and dtypes.
        x: `[b, s, *in]` in the compute dtype.
        weights: `[*in, *out]` each, at rest.
        biases: `[*out]` each, at rest, or None.

    Cost: the moves of `layout`, see `move_local`: x and the weights gathered, the outputs summed;
    backward the same once more (gathers not where `keep`), the gradient of x summed as x was
    gathered, and those of the weights as they were.
    """
    return _forward(island, x, weights, biases)[0]


def _matmuls_fwd(island: Island, x: Array, weights: tuple[Array, ...], biases: Biases):
    ys, gathered = _forward(island, x, weights, biases)
    likes = tuple(jnp.zeros((0,), w.dtype) for w in weights)
    return ys, (gathered if island.keep else (x, weights), likes, biases)


def _forward(island: Island, x: Array, weights: tuple[Array, ...], biases: Biases):
    """The outputs, and x and weights as they were multiplied if they are to be kept."""
    layout, maps = island.layout, island.layout.maps

    def forward_local(x: Array, weights: Any, biases: Any) -> Any:
        x, weights = _gather_local(layout, x, weights)
        ys = []
        for own, w, bias in zip(maps, weights, biases, strict=True):
            y = _product_local(x, w, layout.contract)
            y = move_local(y, own.y_used, own.y_rest, partial=own.k_axes)
            ys.append(y if bias is None else y + _bias_local(own, bias.astype(y.dtype)))
        return tuple(ys), (x, weights) if island.keep else ()

    bias_specs = tuple(
        None if bias is None else spec_of(own.bias_rest)
        for own, bias in zip(maps, biases, strict=True)
    )
    kept = (spec_of(layout.x_used), _specs(m.w_used for m in maps)) if island.keep else ()
    mapped = jax.shard_map(
        forward_local,
        mesh=layout.bound.mesh,
        in_specs=(spec_of(layout.x_rest), _specs(m.w_rest for m in maps), bias_specs),
        out_specs=(_specs(m.y_rest for m in maps), kept),
        check_vma=False,
    )
    return mapped(x, weights, biases)


def _matmuls_bwd(island: Island, residuals: Any, dys: tuple[Array, ...]):
    layout, maps = island.layout, island.layout.maps
    (x, weights), likes, biases = residuals

    def backward_local(x: Array, weights: Any, dys: Any) -> Any:
        if not island.keep:
            x, weights = _gather_local(layout, x, weights)
        used = tuple(
            move_local(dy, own.y_rest, own.y_used) for own, dy in zip(maps, dys, strict=True)
        )
        dws = tuple(
            _weight_gradient_local(island, own, x, dy) for own, dy in zip(maps, used, strict=True)
        )
        dbs = tuple(
            None if bias is None else _bias_gradient_local(island, own, dy)
            for own, dy, bias in zip(maps, dys, biases, strict=True)
        )
        return _input_gradient_local(layout, weights, used), dws, dbs

    w_splits = (m.w_used if island.keep else m.w_rest for m in maps)
    bias_specs = tuple(
        None if bias is None else spec_of(own.bias_grad)
        for own, bias in zip(maps, biases, strict=True)
    )
    mapped = jax.shard_map(
        backward_local,
        mesh=layout.bound.mesh,
        in_specs=(
            spec_of(layout.x_used if island.keep else layout.x_rest),
            _specs(w_splits),
            _specs(m.y_rest for m in maps),
        ),
        out_specs=(spec_of(layout.x_rest), _specs(m.w_grad for m in maps), bias_specs),
        check_vma=False,
    )
    dx, dws, dbs = mapped(x, weights, dys)
    return dx, _alike(dws, likes), _alike(dbs, biases)


matmuls.defvjp(_matmuls_fwd, _matmuls_bwd)


def _gather_local(layout: Layout, x: Array, weights: tuple[Array, ...]) -> Any:
    """The operands as they are multiplied; weights are cast first, where the shards are."""
    used = tuple(
        move_local(w.astype(x.dtype), own.w_rest, own.w_used)
        for own, w in zip(layout.maps, weights, strict=True)
    )
    return move_local(x, layout.x_rest, layout.x_used), used


def _product_local(x: Array, w: Array, contract: int) -> Array:
    """`[b, s, *in] @ [*in, *out]`; as two matrices, which XLA's CPU backend has a call for."""
    tokens, inner = x.shape[:2], math.prod(w.shape[:contract])
    y = jnp.dot(x.reshape(math.prod(tokens), inner), w.reshape(inner, -1))
    return y.reshape(*tokens, *w.shape[contract:])


def _input_gradient_local(
    layout: Layout, weights: tuple[Array, ...], dys: tuple[Array, ...]
) -> Array:
    """The gradient of x at rest: of all maps that are partial over the same axes one sum."""
    parts = []
    for n_axes in dict.fromkeys(own.n_axes for own in layout.maps):
        same = [at for at, own in enumerate(layout.maps) if own.n_axes == n_axes]
        part = _added(
            [_transposed_local(layout, layout.maps[at], weights[at], dys[at]) for at in same]
        )
        if n_axes:
            part = move_local(part, layout.x_used, layout.x_rest, partial=n_axes)
        parts.append(part)
    return _added(parts)


def _added(parts: list[Array]) -> Array:
    return functools.reduce(jnp.add, parts)


def _transposed_local(layout: Layout, own: MapLayout, w: Array, dy: Array) -> Array:
    """`dy @ w.T`, over the blocks of x as multiplied.

    A weight that is whole on every device gives no partial sums but the same on each, so each
    device makes what it keeps, the block of x at rest.
    """
    if not own.n_axes:
        w = move_local(w, own.w_used, (*layout.x_rest[2:], *own.w_used[layout.contract :]))
        dy = move_local(dy, own.y_used, (*layout.x_rest[:2], *own.y_used[2:]))
    tokens, outer = dy.shape[:2], math.prod(dy.shape[2:])
    dx = jnp.dot(dy.reshape(math.prod(tokens), outer), w.reshape(-1, outer).T)
    return dx.reshape(*tokens, *w.shape[: layout.contract])


def _weight_gradient_local(island: Island, own: MapLayout, x: Array, dy: Array) -> Array:
    """`x.T @ dy` summed over all tokens: scattered before it is summed over what is left."""
    rows = math.prod(x.shape[:2])
    dw = jax.lax.dot_general(
        x.reshape(rows, -1),
        dy.reshape(rows, -1),
        (((0,), (0,)), ((), ())),
        preferred_element_type=island.summed,
    )
    dw = dw.reshape(*x.shape[2:], *dy.shape[2:])
    return move_local(dw, own.w_used, own.w_grad, partial=axes_of(own.y_used[:2]))


def _bias_local(own: MapLayout, bias: Array) -> Array:
    return _turned_local(bias, own.bias_rest, own.y_rest[2:])


def _bias_gradient_local(island: Island, own: MapLayout, dy: Array) -> Array:
    """The sum of the output's gradient, at rest, over tokens."""
    db = jnp.sum(dy, axis=(0, 1), dtype=jnp.float32).astype(island.summed)
    return _turned_local(db, own.y_rest[2:], own.bias_grad, partial=axes_of(own.y_rest[:2]))


def _turned_local(x: Array, have: Split, want: Split, *, partial: Axes = ()) -> Array:
    """`move_local` of something small, by way of all of it where blocks do not nest."""
    if nested(have, want):
        return move_local(x, have, want, partial=partial)
    whole = ((),) * len(have)
    return move_local(move_local(x, have, whole), whole, want, partial=partial)


def _alike(found: tuple[Any, ...], likes: tuple[Any, ...]) -> tuple[Any, ...]:
    """Each in the dtype of its parameter."""
    return tuple(
        None if like is None else x.astype(like.dtype) for x, like in zip(found, likes, strict=True)
    )


def _specs(splits: Iterable[Split]) -> tuple[PartitionSpec, ...]:
    return tuple(map(spec_of, splits))
