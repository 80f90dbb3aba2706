"""What a layer computes, handed out of a stack: keys and values of its attention."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxtyping import Array

from colossax.layerwise import LayerState

TAPS = "taps"
"""Name in what travels through a stack."""


def tapped(state: LayerState, **arrays: Array) -> LayerState:
    """The state with these arrays where it asks for them; each layer puts its own over the last's.

    Args:
        state: Of the layer.
        **arrays: By name, of the shapes that were asked for.
    """
    asked = (state.carried or {}).get(TAPS)
    if asked is None:
        return state
    held = {name: arrays[name].astype(x.dtype) for name, x in asked.items()}
    return dataclasses.replace(state, carried={**state.carried, TAPS: held})


def with_taps(order: tuple[str, ...], arrays: Mapping[str, Any]) -> dict[str, Any]:
    """What a stack is to carry, so that its last layer's arrays come out of it.

    Args:
        order: Kinds of its layers, `LayerStack.order`.
        arrays: Zeros of the arrays' shapes, by name.
    """
    carried = {TAPS: dict(arrays)}
    return {order[-1]: carried} if order[-1] else carried


def taps_of(order: tuple[str, ...], carried: Any) -> dict[str, Array]:
    """The arrays, of what came out of it."""
    return (carried[order[-1]] if order[-1] else carried)[TAPS]
