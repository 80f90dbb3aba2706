"""Parameters of runs in host memory, of which others stand in their place where gradients count."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jaxtyping import Array

from colossax.offload import fetch

Hosted = Mapping[tuple[str, int], Sequence[Any]]
"""By run, of each leaf of its parameters, the array in host memory; None for what is not there."""


class _Held:
    """What is in force. Traces that JAX keeps hold this, which is empty afterwards."""

    def __init__(self, hosted: Hosted):
        self.hosted: Hosted | None = hosted


_HOSTED = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def standing_in(hosted: Hosted) -> Iterator[None]:
    """Let what runs get as parameters stand for these, in everything traced inside.

    Layers are computed with these, fetched one by one; gradients are of what stands for them,
    which is on the devices, and whose values nobody reads.
    """
    held = _Held(hosted)
    try:
        with _HOSTED(held):
            yield
    finally:
        held.hosted = None


def hosted_of(key: tuple[str, int]) -> Sequence[Any] | None:
    """Of a run, what others stand for; None if its parameters are what it gets."""
    held = _HOSTED.value
    return None if held is None or held.hosted is None else held.hosted.get(key)


def fetched(row: Any, hosted: Sequence[Any], at: Any, *, stacked: bool = True) -> Any:
    """Parameters of a layer, on the device.

    Args:
        row: What it got.
        hosted: See `hosted_of`.
        at: Number of the layer in the run.
        stacked: Whether arrays have a dim of layers.
    """
    leaves, structure = jax.tree.flatten(row)
    found = [
        leaf if stack is None else _instead(leaf, fetch(stack, at, stacked=stacked))
        for leaf, stack in zip(leaves, hosted, strict=True)
    ]
    return jax.tree.unflatten(structure, found)


@jax.custom_vjp
def _instead(place: Array, value: Array) -> Array:
    """`value`, whose gradient is that of `place`."""
    return value


_instead.defvjp(lambda place, value: (value, None), lambda _, by: (by, None))
