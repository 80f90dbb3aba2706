"""Layers that are alike, shared by stages that are not: so that the slowest is the least slow."""

import dataclasses
import heapq
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageCost:
    """What a stage takes of a microbatch.

    Attributes:
        layer_s: Seconds of each layer.
        rest_s: Of what it has beside layers.
        most: Layers that its memory has room for.
    """

    layer_s: float
    rest_s: float = 0.0
    most: int

    def seconds(self, layers: int) -> float:
        """With so many layers."""
        return self.layer_s * layers + self.rest_s


def share_layers(stages: Sequence[StageCost], layers: int) -> tuple[int, ...] | None:
    """Layers of each stage, one or more, whose slowest stage is fastest; None where none fit.

    Exact: one layer after another goes to the stage that is fastest with it. No stage ever gets
    slower by a layer less, so what the last of them made slowest had to go somewhere as slow.

    Cost: O(layers log stages).
    """
    if layers < len(stages) or any(one.most < 1 for one in stages):
        return None
    counts = [1] * len(stages)
    waiting = [(one.seconds(2), at) for at, one in enumerate(stages) if one.most > 1]
    heapq.heapify(waiting)
    for _ in range(layers - len(stages)):
        if not waiting:
            return None
        _, at = heapq.heappop(waiting)
        counts[at] += 1
        if counts[at] < stages[at].most:
            heapq.heappush(waiting, (stages[at].seconds(counts[at] + 1), at))
    return tuple(counts)


def step_seconds(seconds: Sequence[float], hops: Sequence[float], microbatches: int) -> float:
    """Of a step under 1F1B whose stages each wait for their inputs alone.

    The first microbatch passes through all stages, and back; one more is done each time that the
    slowest stage is through, or that what a stage has in flight comes back to it.

    Args:
        seconds: Of each stage, a microbatch forward and backward.
        hops: From each to the next, one way.
        microbatches: A step.
    """
    around, turn = 0.0, 0.0
    for at in range(len(seconds) - 1, -1, -1):
        around += seconds[at] + (2 * hops[at] if at < len(hops) else 0.0)
        flying = min(len(seconds) - at, microbatches)
        turn = max(turn, seconds[at], around / flying)
    return around + (microbatches - 1) * turn
