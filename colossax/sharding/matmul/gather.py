"""Multiplying what was gathered, and summing the result: the plain way, in every layout."""

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from colossax.sharding.matmul.layout import Layout, MapLayout
from colossax.sharding.matmul.products import (
    input_gradient_local,
    product_local,
    weight_gradient_local,
)
from colossax.sharding.matmul.splits import move_local

Arrays = tuple[Array, ...]


def forward_local(layout: Layout, x: Array, weights: Arrays) -> tuple[Arrays, Array]:
    """The outputs at rest, and x as it was multiplied."""
    x = move_local(x, layout.x_rest, layout.x_used)
    ys = tuple(
        move_local(product_local(x, w), linear.y_used, linear.y_rest, partial=linear.k_axes)
        for linear, w in zip(layout.maps, weights, strict=True)
    )
    return ys, x


def backward_local(
    layout: Layout, x: Array, weights: Arrays, dys: Arrays, *, kept: bool, summed: Any
) -> tuple[Array, Arrays]:
    """The gradient of x at rest, and those of the weights summed over the tokens that are here."""
    if not kept:
        x = move_local(x, layout.x_rest, layout.x_used)
    used = [
        move_local(dy, linear.y_rest, linear.y_used)
        for linear, dy in zip(layout.maps, dys, strict=True)
    ]
    dws = tuple(weight_gradient_local(x, dy, summed) for dy in used)
    parts = []
    for n_axes in dict.fromkeys(linear.n_axes for linear in layout.maps):
        same = [at for at, linear in enumerate(layout.maps) if linear.n_axes == n_axes]
        part = added(
            [_transposed_local(layout, layout.maps[at], weights[at], used[at]) for at in same]
        )
        if n_axes:  # one sum for all maps that are partial over the same axes
            part = move_local(part, layout.x_used, layout.x_rest, partial=n_axes)
        parts.append(part)
    return added(parts), dws


def _transposed_local(layout: Layout, linear: MapLayout, w: Array, dy: Array) -> Array:
    if linear.n_axes:
        return input_gradient_local(dy, w)
    # A weight that is whole on every device gives not partial sums but the same on each, so each
    # makes only what it keeps.
    w = move_local(w, linear.w_used, (*layout.x_rest[2:], *linear.w_used[layout.contract :]))
    dy = move_local(dy, linear.y_used, (*layout.x_rest[:2], *linear.y_used[2:]))
    return input_gradient_local(dy, w)


def added(parts: list[Array]) -> Array:
    """The sum of one or more arrays."""
    return functools.reduce(jnp.add, parts)
