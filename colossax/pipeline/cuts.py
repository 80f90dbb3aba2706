"""Where the layers of a model are cut into stages, so that the slowest stage is the least slow.

Exact for a given order of devices. Seconds and bytes are modelled from what is given of each layer
and device; nothing is run.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from colossax.config import NotNegative, Positive, at_least, check_types
from colossax.errors import InputError, PlanError

TIE = 1e-12
"""Relative difference of seconds below which stages are equally slow: sums round."""

_GB = 1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCost:
    """What one layer takes; or what an embedding adds to the first layer, a head to the last.

    Attributes:
        seconds: Forward and backward of a microbatch, on a device of speed 1.
        state_bytes: Parameters, their gradients and optimizer state.
        kept_bytes: From forward to backward, for each microbatch in flight.
        out_bytes: Handed to the next layer, per microbatch; the gradient that comes back is as
            large. Without meaning for an embedding or a head.
    """

    seconds: NotNegative
    state_bytes: int | float = 0
    kept_bytes: int | float = 0
    out_bytes: int | float = 0

    def __post_init__(self):
        check_types(self, "layer")
        for field in ("state_bytes", "kept_bytes", "out_bytes"):
            at_least(0).check(float(getattr(self, field)), f"layer.{field}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageDevice:
    """What computes a stage: a device, or several that are split by other mesh axes.

    Attributes:
        speed: Relative to what `LayerCost.seconds` were measured on.
        memory_bytes: For state and what is kept; None where nothing bounds it.
        kind: For people.
    """

    speed: Positive = 1.0
    memory_bytes: int | float | None = None
    kind: str = ""

    def __post_init__(self):
        where = f"device '{self.kind}'" if self.kind else "device"
        check_types(self, where)
        if self.memory_bytes is not None:
            at_least(0).check(float(self.memory_bytes), f"{where}.memory_bytes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """What lies between two devices, the same in both directions.

    Attributes:
        bytes_per_s: None where what it takes is left out.
        latency_s: Of one transfer.
    """

    bytes_per_s: Positive | None = None
    latency_s: NotNegative = 0.0

    def __post_init__(self):
        check_types(self, "link")

    def seconds(self, sent_bytes: np.ndarray) -> np.ndarray:
        """Of one transfer of each of these."""
        return self.latency_s + sent_bytes / (self.bytes_per_s or np.inf)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cuts:
    """Layers cut into stages.

    Attributes:
        layers: How many each stage has, in order.
        modelled_s: Of each stage, a microbatch's forward and backward and what it sends.
        modelled_bytes: Of each stage.
        even: How many layers each stage has where they are cut evenly.
        modelled_even_s: Of the slowest stage where layers are cut evenly; None where a stage's
            bytes would then exceed its device.
    """

    layers: tuple[int, ...]
    modelled_s: tuple[float, ...]
    modelled_bytes: tuple[float, ...]
    even: tuple[int, ...]
    modelled_even_s: float | None

    @property
    def slowest_s(self) -> float:
        """Of the slowest stage, modelled."""
        return max(self.modelled_s)

    @property
    def modelled_gain(self) -> float | None:
        """How many times as fast as even cuts; None where those do not fit."""
        if self.modelled_even_s is None:
            return None
        return self.modelled_even_s / self.slowest_s if self.slowest_s else 1.0

    @property
    def line(self) -> str:
        """For people."""
        return self._told(f", modelled {self.slowest_s:.3g} s for the slowest stage")

    @property
    def compared(self) -> str:
        """For people, where the seconds have no unit."""
        return self._told("")

    def _told(self, seconds: str) -> str:
        cut = f"layers {','.join(map(str, self.layers))}{seconds}"
        even = f"cut evenly ({','.join(map(str, self.even))})"
        if self.layers == self.even:
            return f"{cut}, cut evenly"
        if self.modelled_gain is None:
            return f"{cut}; {even} they would not fit"
        return f"{cut}, a modelled {self.modelled_gain:.2f} times as fast as {even}"


def even_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage, cut as evenly as they divide; the first have those left over."""
    each, over = divmod(layers, stages)
    return tuple(each + (stage < over) for stage in range(stages))


def cut_layers(
    layers: Sequence[LayerCost],
    devices: Sequence[StageDevice],
    *,
    links: Sequence[Link] | None = None,
    in_flight: Sequence[int] | None = None,
    first: LayerCost | None = None,
    last: LayerCost | None = None,
) -> Cuts:
    """The contiguous cuts of layers whose slowest stage is fastest, for devices in this order.

    A stage takes the seconds of its layers over its device's speed, and those in which it sends its
    output on and its input's gradient back. It needs the state of its layers, and what they keep of
    each microbatch in flight. Of cuts whose slowest stage is equally slow, those with the least sum
    of squares of all stages' seconds.

    Args:
        layers: In the order of the model.
        devices: One for each stage, in order.
        links: From each stage to the next; None: what is sent takes no time.
        in_flight: Microbatches that each stage keeps at once; None: as in 1F1B, as many as there
            are stages from it on.
        first: What comes before the first layer, such as an embedding.
        last: What comes after the last, such as a head and the loss.

    Raises:
        InputError: More stages than layers, or lists of other lengths.
        PlanError: There are no cuts with which each stage fits its device; a stage is named.

    Cost: time and memory O(L^2), per stage.
    Source: exact for chains, by dynamic programming over (stage, layers before its end).
    """
    costs = LayerSums(layers, len(devices), in_flight=in_flight, first=first, last=last)
    links = checked_links(links, len(devices))
    times = [
        costs.stage_s(device, stage, before=before, behind=behind)
        for stage, (device, before, behind) in enumerate(
            zip(devices, [None, *links], [*links, None], strict=True)
        )
    ]
    best = _least(times, np.maximum)[-1][-1]
    if not np.isfinite(best):
        raise PlanError(_refusal(costs, devices))
    # No stage may be slower than the slowest must be; of those the sum of squares decides.
    allowed = [np.where(t <= best * (1 + TIE), t * t, np.inf) for t in times]
    bounds = _path(allowed, _least(allowed, np.add), np.add)
    return _cuts(costs, times, bounds)


class LayerSums:
    """Layers as sums up to each cut: index `j` is of the layers before layer `j`."""

    def __init__(
        self,
        layers: Sequence[LayerCost],
        stages: int,
        *,
        in_flight: Sequence[int] | None = None,
        first: LayerCost | None = None,
        last: LayerCost | None = None,
    ):
        """Check and add up; see `cut_layers`."""
        if not stages:
            raise InputError("devices: found none; give one for each stage")
        if stages > len(layers):
            raise InputError(
                f"stages: found {stages} for {len(layers)} layers, and each needs one; ask for"
                f" {len(layers)} or fewer"
            )
        self.count, self.stages = len(layers), stages
        self.in_flight = _checked_in_flight(in_flight, stages)
        self.seconds = self._sums(layers, first, last, "seconds")
        self.state_bytes = self._sums(layers, first, last, "state_bytes")
        self.kept_bytes = self._sums(layers, first, last, "kept_bytes")
        self.out_bytes = np.array([0.0, *(layer.out_bytes for layer in layers[:-1]), 0.0])

    @staticmethod
    def _sums(
        layers: Sequence[LayerCost], first: LayerCost | None, last: LayerCost | None, field: str
    ) -> np.ndarray:
        # The first layer is always the first stage's and the last the last one's, so what comes
        # before and after may count as theirs.
        each = np.array([getattr(layer, field) for layer in layers], np.float64)
        each[0] += getattr(first, field, 0.0)
        each[-1] += getattr(last, field, 0.0)
        return np.concatenate([[0.0], np.cumsum(each)])

    @functools.cached_property
    def _ordered(self) -> np.ndarray:
        """`[L + 1, L + 1]`: whether a stage from layer i to before j has a layer."""
        return np.triu(np.ones((self.count + 1,) * 2, bool), 1)

    def bytes_of(self, stage: int) -> np.ndarray:
        """`[L + 1]`: of all layers before j, with what this stage has in flight."""
        return self.state_bytes + self.in_flight[stage] * self.kept_bytes

    def stage_s(
        self, device: StageDevice, stage: int, *, before: Link | None, behind: Link | None
    ) -> np.ndarray:
        """`[L + 1, L + 1]`: of this stage with the layers from i to before j; infinite, if none.

        Args:
            device: Computes it.
            stage: Its number.
            before: To the stage before it.
            behind: To the stage after it.
        """
        begin = -self.seconds / device.speed
        end = self.seconds / device.speed
        if before is not None:
            begin = begin + before.seconds(self.out_bytes)
        if behind is not None:
            end = end + behind.seconds(self.out_bytes)
        return np.where(self._ordered & self.fits(device, stage), begin[:, None] + end, np.inf)

    def fits(self, device: StageDevice, stage: int) -> np.ndarray:
        """`[L + 1, L + 1]`: whether its bytes are within the device's."""
        if device.memory_bytes is None:
            return np.ones((), bool)
        sums = self.bytes_of(stage)
        return sums - sums[:, None] <= device.memory_bytes


def checked_links(links: Sequence[Link] | None, stages: int) -> Sequence[Link]:
    """The links between stages; without any, such as take no time.

    Raises:
        InputError: There are more or fewer.
    """
    links = [Link()] * (stages - 1) if links is None else links
    if len(links) != stages - 1:
        raise InputError(
            f"links: found {len(links)} for {stages} stages; give {stages - 1}, from each stage to"
            " the next"
        )
    return links


def _checked_in_flight(in_flight: Sequence[int] | None, stages: int) -> Sequence[int]:
    if in_flight is None:
        return range(stages, 0, -1)
    if len(in_flight) != stages or min(in_flight) < 1:
        raise InputError(
            f"in_flight: found {list(in_flight)} for {stages} stages; give each its number of"
            " microbatches, 1 or more"
        )
    return in_flight


def _least(times: Sequence[np.ndarray], joined: Any) -> list[np.ndarray]:
    """`[L + 1]` for each number of stages: the least that the layers before j take.

    Args:
        times: `[L + 1, L + 1]` of each stage.
        joined: Of two stages: `np.maximum`, or `np.add`.
    """
    found = [np.full(len(times[0]), np.inf)]
    found[0][0] = 0.0
    for stage in times:
        found.append(joined(found[-1][:, None], stage).min(axis=0))
    return found


def _path(times: Sequence[np.ndarray], found: Sequence[np.ndarray], joined: Any) -> list[int]:
    """The cuts, from 0 to the number of layers, that the least value comes from."""
    bounds = [len(times[0]) - 1]
    for stage, before in zip(times[::-1], found[-2::-1], strict=True):
        bounds.append(int(joined(before, stage[:, bounds[-1]]).argmin()))
    return bounds[::-1]


def _cuts(costs: LayerSums, times: Sequence[np.ndarray], bounds: Sequence[int]) -> Cuts:
    even = even_layers(costs.count, costs.stages)
    even_s = max(_along(times, [0, *np.cumsum(even).tolist()]))
    pairs = enumerate(itertools.pairwise(bounds))
    found = [costs.bytes_of(stage)[list(pair)] for stage, pair in pairs]
    return Cuts(
        layers=tuple(int(n) for n in np.diff(bounds)),
        modelled_s=tuple(_along(times, bounds)),
        modelled_bytes=tuple(float(end - begin) for begin, end in found),
        even=even,
        modelled_even_s=even_s if np.isfinite(even_s) else None,
    )


def _along(times: Sequence[np.ndarray], bounds: Sequence[int]) -> list[float]:
    pairs = itertools.pairwise(bounds)
    return [float(stage[pair]) for stage, pair in zip(times, pairs, strict=True)]


def _refusal(costs: LayerSums, devices: Sequence[StageDevice]) -> str:
    """Which stage cannot hold what is left to it, however the stages before it are cut."""
    reached = np.arange(costs.count + 1) == 0
    for stage, device in enumerate(devices):
        left = costs.stages - stage - 1
        ends = costs.fits(device, stage) & costs._ordered & reached[:, None]
        ends[:, costs.count - left + 1 :] = False
        if not left:
            ends[:, :-1] = False
        if not ends.any():
            return _too_large(costs, stage, device, int(np.flatnonzero(reached)[-1]))
        reached = ends.any(axis=0)
    raise AssertionError("there are cuts that fit")


def _too_large(costs: LayerSums, stage: int, device: StageDevice, begin: int) -> str:
    left = costs.stages - stage - 1
    end = begin + 1 if left else costs.count
    sums = costs.bytes_of(stage)
    named = f"layer {begin}" if end == begin + 1 else f"layers {begin} to {end - 1}"
    kind = f" ('{device.kind}')" if device.kind else ""
    room = (device.memory_bytes or 0) / _GB
    before = ", though the stages before it hold as many as they can" if stage else ""
    return (
        f"stage {stage}{kind}: {named} with {costs.in_flight[stage]} microbatches in flight need"
        f" {(sums[end] - sums[begin]) / _GB:.4g} GB and it has {room:.4g} GB"
        f"{before}; give more stages, more memory or a remat that keeps less"
    )
