"""Giving up a step's old state: its buffers become the new state's, or are freed after the step."""

from collections.abc import Callable
from typing import Any

import jax

from colossax.typing import Batch, TrainState


class PartlyDonated:
    """A jitted step that reads some arrays of the old state until the new ones are whole.

    Donated, such an array would lend its buffer to the new one, which XLA would have to write
    elsewhere and copy. So it is not, and is deleted once the step is under way: memory holds two
    of it during a step and one between steps. Called like any jitted step, and the old state is
    gone afterwards all the same.
    """

    def __init__(self, pure: Callable, read: TrainState, **options: Any):
        """Compile nothing yet.

        Args:
            pure: `(state, batch) -> (new state, ...)`.
            read: Of each array of the state, whether it is read until the end.
            **options: Of `jax.jit`.
        """
        self._read = read

        def joined(kept: Any, donated: Any, batch: Batch) -> Any:
            leaves = jax.tree.map(lambda r, k, d: k if r else d, read, kept, donated)
            return pure(leaves, batch)

        self._jitted = jax.jit(joined, donate_argnums=1, **options)

    def __call__(self, state: TrainState, batch: Batch) -> Any:
        """Run the step, once the one before has ended: its old arrays are freed by then."""
        jax.block_until_ready(state["step"])
        kept, donated = self._divided(state)
        results = self._jitted(kept, donated, batch)
        for array in jax.tree.leaves(kept):
            array.delete()  # held by the running step until it ends
        return results

    def lower(self, state: TrainState, batch: Batch) -> Any:
        """As `lower` of `jax.jit`."""
        return self._jitted.lower(*self._divided(state), batch)

    def trace(self, state: TrainState, batch: Batch) -> Any:
        """As `trace` of `jax.jit`."""
        return self._jitted.trace(*self._divided(state), batch)

    def _divided(self, state: TrainState) -> tuple[Any, Any]:
        """The arrays read until the end, and the others; None in place of those left out."""
        kept = jax.tree.map(lambda r, x: x if r else None, self._read, state)
        donated = jax.tree.map(lambda r, x: None if r else x, self._read, state)
        return kept, donated
