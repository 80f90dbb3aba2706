"""Rings of slots: written at the number of a tick, by all stages; each reads where it likes."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from colossax.layerwise import over_stages
from colossax.layerwise.in_place import put_row


def empty(shapes: Any, slots: int, *, lead: Sequence[int] = ()) -> Any:
    """A ring of zeros, `[slots, *lead, ...]` each."""
    return jax.tree.map(lambda x: jnp.zeros((slots, *lead, *x.shape), x.dtype), shapes)


def put(ring: Any, tick: Array, values: Any) -> Any:
    """A ring with these values in the slot of a tick."""

    def one(x: Array, value: Array) -> Array:
        return put_row(x, value.astype(x.dtype), tick % x.shape[0])

    return jax.tree.map(one, ring, values)


def slot(ring: Any, tick: Array) -> Any:
    """What was put there in a tick."""
    return jax.tree.map(lambda x: x[0] if x.shape[0] == 1 else _at(x, tick % x.shape[0]), ring)


def slots(ring: Any, ticks: Array) -> Any:
    """Of each stage what it put there in a tick of its own, `[stages, ...]`."""

    def one(x: Array) -> Array:
        if x.shape[0] == 1:
            return x[0]
        return over_stages(_at, in_axes=(1, 0))(x, ticks % x.shape[0])

    return jax.tree.map(one, ring)


def sent(rings: Sequence[Any], cells: Any) -> Any:
    """Of each stage what was sent to it in a tick of its own, by a way of its own.

    Args:
        rings: Of each way.
        cells: What the table says of the tick; see `Cells`.
    """
    found, *others = (slots(ring, cells["source"]) for ring in rings)
    for way, other in enumerate(others, 1):
        found = chosen(cells["way"] == way, other, found)
    return found


def layer(ring: Any, tick: Array, number: Array) -> Any:
    """Of what a stage put there in a tick, `[slots, layers, ...]`, one layer's.

    A slot alone would be copied, to be read layer by layer.
    """

    def one(x: Array) -> Array:
        start = (tick % x.shape[0], number, *[jnp.int32(0)] * (x.ndim - 2))
        return jax.lax.dynamic_slice(x, start, (1, 1, *x.shape[2:]))[0, 0]

    return jax.tree.map(one, ring)


def chosen(where: Array, one: Any, other: Any) -> Any:
    """By stage, one tree or the other; of `one`, leaves may have a dim of 1."""

    def of(a: Array, b: Array) -> Array:
        return jnp.where(where.reshape(-1, *[1] * (b.ndim - 1)), a, b)

    return jax.tree.map(of, one, other)


def _at(x: Array, index: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False)
