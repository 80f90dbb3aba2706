"""The layers of a stage under several policies, one after another: the same ones on every stage."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from colossax.config import Segment
from colossax.layerwise.cut import CutRun
from colossax.layerwise.stages import Chunks, Part, StageLayers


def stage_layers(
    runs: Sequence[CutRun],
    rows: Sequence[Any],
    stages: int,
    carry: Any,
    side: Any,
    segments: Sequence[Segment] = (),
) -> "StageLayers | SeveralPolicies":
    """What every stage does with its layers.

    Args:
        runs: See `StageLayers`, as all that follows.
        rows: Shapes of parameters.
        stages: How many.
        carry: Shapes.
        side: Shapes.
        segments: Policies of each stage's layers, in each of its chunks; none: that of the runs.

    Raises:
        PlanError: See `StageLayers`.
    """
    if not segments:
        return StageLayers(runs, rows, stages, carry, side)
    starts = itertools.accumulate((segment.count for segment in segments), initial=0)
    parts = [Part(start=at, policy=policy) for at, policy in zip(starts, segments, strict=False)]
    return SeveralPolicies([StageLayers(runs, rows, stages, carry, side, part) for part in parts])


class SeveralPolicies:
    """`StageLayers` that follow one another in every chunk; of what they keep, a list of all.

    Attributes:
        count: Layers of a chunk.
    """

    def __init__(self, parts: Sequence[StageLayers]):
        self._parts = parts
        self.count = sum(part.count for part in parts)

    @property
    def carries(self) -> tuple[bool, ...]:
        """See `StageLayers`."""
        return tuple(each for part in self._parts for each in part.carries)

    @property
    def hosts(self) -> tuple[bool, ...]:
        """See `StageLayers`."""
        return tuple(each for part in self._parts for each in part.hosts)

    @property
    def fetches(self) -> bool:
        """See `StageLayers`."""
        return self._parts[0].fetches

    def forward(self, rows: Chunks, carry: Any, *others: Any) -> Any:
        """See `StageLayers`."""
        return self._forward("forward", 0, carry, lambda carry: (rows, carry, *others))

    def forward_fetching(self, rows: Chunks, carry: Any, *others: Any) -> Any:
        """See `StageLayers`."""
        return self._forward("forward_fetching", 1, carry, lambda carry: (rows, carry, *others))

    def _forward(self, name: str, axis: int, carry: Any, args: Callable[[Any], Any]) -> Any:
        kept, sums = [], []
        for part in self._parts:
            carry, (held, counted) = getattr(part, name)(*args(carry))
            kept += held
            sums.append(counted)
        joined = jax.tree.map(lambda *x: jnp.concatenate(x, axis=axis), *sums)
        return carry, (tuple(kept), joined)

    def backward(
        self,
        rows: Chunks,
        grads: Chunks,
        cotangent: tuple[Any, Any],
        side: Any,
        kept: Callable[[Array], Any],
        *cell: Array,
    ) -> tuple[Any, Chunks]:
        """See `StageLayers`; `kept` gives what all keep, of which each takes its own."""
        after, sums = cotangent
        for part, own in reversed(list(self._divided())):
            given = (after, sums), side, lambda number, own=own: kept(number)[own]
            after, grads = part.backward(rows, grads, *given, *cell)
        return after, grads

    def backward_fetching(
        self,
        rows: Chunks,
        grads: Chunks,
        cotangent: tuple[Any, Any],
        side: Any,
        kept: Sequence[Array],
        *cell: Array,
    ) -> tuple[Any, Chunks]:
        """See `StageLayers`."""
        after, sums = cotangent
        for part, own in reversed(list(self._divided())):
            given = (after, sums), side, kept[own]
            after, grads = part.backward_fetching(rows, grads, *given, *cell)
        return after, grads

    def _divided(self) -> Iterator[tuple[StageLayers, slice]]:
        """Which of what is kept is of each part."""
        at = 0
        for part in self._parts:
            stop = at + len(part.carries)
            yield part, slice(at, stop)
            at = stop
