"""Rows of stacks in host memory, fetched before the layer that wants them."""

from typing import Any

import jax
import jax.numpy as jnp

from colossax.offload import fetch, on_host


class Ahead:
    """A ring of two device slots: what the layer at hand computes with, and the next one's.

    Only of stacks that the loop leaves as they are: one that it changes would be copied whole, in
    host memory, in every turn.

    Cost: one layer's rows on the device beside those in use. A copy has the whole layer before it
    to be done in, where one within the layer has what comes before its first use.
    """

    def __init__(self, stacks: Any, last: Any):
        """Of which stacks.

        Args:
            stacks: With a dim of rows in front; those in host memory are fetched ahead.
            last: Number of the last row that is wanted.
        """
        self._stacks, self._structure = jax.tree.flatten(stacks)
        self._there = [on_host(stack) for stack in self._stacks]
        self._last = last

    def first(self, row: Any) -> list[Any]:
        """What the loop carries at first."""
        pairs = zip(self._stacks, self._there, strict=True)
        return [fetch(stack, row) for stack, there in pairs if there]

    def turn(self, slots: list[Any], row: Any, step: int) -> tuple[Any, list[Any]]:
        """The row, and what the loop carries to the next: `row + step`.

        Args:
            slots: What it carried here.
            row: Number of the row.
            step: 1, or -1 where the loop goes from the last one to the first.
        """
        held, after = iter(slots), row + step
        after = jnp.minimum(after, self._last) if step > 0 else jnp.maximum(after, self._last)
        pairs = list(zip(self._stacks, self._there, strict=True))
        rows = [next(held) if there else fetch(stack, row) for stack, there in pairs]
        return jax.tree.unflatten(self._structure, rows), self.first(after)
