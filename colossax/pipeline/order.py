"""In which order unequal devices follow one another as the stages of a pipeline.

Devices that equal one another in speed, memory and links are one kind, and may be exchanged. Up to
a number of states (how many devices of each kind are placed) a dynamic program over them is exact;
beyond, a search of bounded length betters what is given.
"""

import dataclasses
import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from colossax.errors import PlanError
from colossax.pipeline.cuts import TIE, Cuts, LayerCost, LayerSums, Link, StageDevice, cut_layers
from colossax.pipeline.kinds import Kinds, Links

EXACT_STATES = 2**12
"""Up to which the search is exact: 12 devices that all differ, or more of few kinds."""

TRIES = 2000
"""Orders that the bounded search looks at."""

FEW_TRIES = 100
"""Orders that are looked at before the exact search, whose bound they give."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ordered:
    """Devices in the order of stages, and the cuts for it.

    Attributes:
        devices: Their numbers, as given.
        cuts: Of the layers, for this order.
        exact: Whether no order is faster; else it is the best of those that were tried.
    """

    devices: tuple[int, ...]
    cuts: Cuts
    exact: bool


def order_devices(
    layers: Sequence[LayerCost],
    devices: Sequence[StageDevice],
    *,
    links: Links | None = None,
    in_flight: Sequence[int] | None = None,
    first: LayerCost | None = None,
    last: LayerCost | None = None,
    seed: int = 0,
) -> Ordered:
    """The order of devices whose slowest stage, at its best cuts, is fastest.

    Never slower than the order given, which stays where none is faster.

    Args:
        layers: See `cut_layers`.
        devices: In any order.
        links: Between any two of them, the same both ways; None: what is sent takes no time.
        in_flight: See `cut_layers`; of a stage, whichever device computes it.
        first: See `cut_layers`.
        last: See `cut_layers`.
        seed: Of the bounded search, which does the same each time.

    Raises:
        InputError: More devices than layers, or links of other numbers of devices.
        PlanError: No order was found in which the layers fit.

    Cost: exact, up to `EXACT_STATES` states times kinds of devices times O(w^2) with w the layers
    that a cut may lie among; bounded, `TRIES` orders.
    """
    costs = LayerSums(layers, len(devices), in_flight=in_flight, first=first, last=last)
    kinds = Kinds(devices, links)
    search = _Search(costs, kinds)
    order, best = _tried(search, kinds, random.Random(seed))
    exact = best <= search.least * (1 + TIE)
    if not exact and kinds.states <= EXACT_STATES:
        exact, faster = True, search.exact(best * (1 - TIE))
        order = order if faster is None else faster
    numbers = kinds.numbered(order)
    chosen = [devices[number] for number in numbers]
    between = None if links is None else [links[a][b] for a, b in itertools.pairwise(numbers)]
    try:
        cuts = cut_layers(
            layers, chosen, links=between, in_flight=in_flight, first=first, last=last
        )
    except PlanError as problem:
        tried = "no order" if exact else f"none of {TRIES} orders"
        raise PlanError(f"{problem}; {tried} of these devices fits them better") from None
    return Ordered(devices=numbers, cuts=cuts, exact=exact)


@dataclasses.dataclass(frozen=True)
class _Front:
    """Of stages that are placed: the least their slowest takes, by the layers they have.

    Attributes:
        low: Fewest layers; `values[n]` is of `low + n`.
        values: Seconds, infinite where it cannot be, or no faster than what is known.
    """

    low: int
    values: np.ndarray


_Places = dict[tuple[int, Link | None], _Front]
"""By the last kind and the link behind it, None at the end."""


class _Search:
    """Orders of kinds, and how slow their slowest stages are."""

    def __init__(self, costs: LayerSums, kinds: Kinds):
        self._costs, self._kinds = costs, kinds
        self._speeds = [device.speed for device in kinds.devices]
        different = {link for row in kinds.links for link in row}
        self._sending: dict[Link | None, np.ndarray] = {
            link: link.seconds(costs.out_bytes) for link in different
        }
        self._sending[None] = np.zeros(costs.count + 1)
        self.least = self._least()

    def _least(self) -> float:
        """Less than this no order takes: stages of any consecutive layers, sending nothing."""
        sums, count = self._costs.seconds, self._costs.count
        at = np.arange(count + 1)

        def enough(seconds: float) -> bool:
            longest = [sums + seconds * speed * (1 + TIE) for speed in self._speeds]
            most = [int((np.searchsorted(sums, s, "right") - 1 - at).max()) for s in longest]
            return sum(n * m for n, m in zip(self._kinds.counts, most, strict=True)) >= count

        low, high = 0.0, float(sums[-1]) / min(self._speeds)
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (low, middle) if enough(middle) else (middle, high)
        return high * (1 + TIE)

    def slowest(self, order: Sequence[int], bound: float = np.inf) -> float:
        """Seconds of the slowest stage at the best cuts; infinite where not below the bound."""
        pairs = [self._kinds.links[a][b] for a, b in itertools.pairwise(order)]
        counts = Counter()
        front = _Front(0, np.zeros(1))
        for kind, before, behind in zip(order, [None, *pairs], [*pairs, None], strict=True):
            counts[kind] += 1
            placed = [counts[k] for k in range(len(self._speeds))]
            (found,) = self._next(front, kind, before, [behind], placed, bound)
            if found is None:
                return np.inf
            front = found
        return float(front.values[-1])

    def _next(
        self,
        front: _Front,
        kind: int,
        before: Link | None,
        behind: Sequence[Link | None],
        placed: Sequence[int],
        bound: float,
    ) -> list[_Front | None]:
        """The front with a stage of this kind added, for each link that may lie behind it.

        None where nothing is below the bound.

        Args:
            front: Before it.
            kind: Of its device.
            before: In front of it.
            behind: Behind it.
            placed: Devices of each kind, with this one.
            bound: Seconds.
        """
        window = self._window(placed, bound)
        if window is None:
            return [None] * len(behind)
        times = self._times(front, kind, (before, behind), sum(placed) - 1, window)
        values = np.maximum(front.values[:, None], times).min(axis=1)
        values[values >= bound] = np.inf
        return [_trimmed(window[0], each) for each in values]

    def _times(
        self,
        front: _Front,
        kind: int,
        links: tuple[Link | None, Sequence[Link | None]],
        stage: int,
        window: tuple[int, int],
    ) -> np.ndarray:
        """Seconds of the stage `[links behind it, layers before it, layers with it]`."""
        costs, device = self._costs, self._kinds.devices[kind]
        begins = slice(front.low, front.low + len(front.values))
        ends = slice(window[0], window[1] + 1)
        scaled = costs.seconds / device.speed
        begin = self._sending[links[0]][begins] - scaled[begins]
        end = np.stack([self._sending[link][ends] for link in links[1]]) + scaled[ends]
        times = begin[:, None] + end[:, None]
        at = np.arange(costs.count + 1)
        wrong = at[begins, None] >= at[ends]
        if device.memory_bytes is not None:
            sums = costs.bytes_of(stage)
            wrong |= sums[ends] - sums[begins, None] > device.memory_bytes
        times[:, wrong] = np.inf
        return times

    def _window(self, placed: Sequence[int], bound: float) -> tuple[int, int] | None:
        """Fewest and most layers of these devices, so that they and the rest stay below a bound."""
        costs = self._costs
        done, left = sum(placed), costs.stages - sum(placed)
        if not left:
            return costs.count, costs.count
        low, high = done, costs.count - left
        if np.isfinite(bound):
            speeds = [n * speed for n, speed in zip(placed, self._speeds, strict=True)]
            all_ = sum(n * v for n, v in zip(self._kinds.counts, self._speeds, strict=True))
            reach = bound * (1 + TIE) * sum(speeds)
            rest = costs.seconds[-1] - bound * (1 + TIE) * (all_ - sum(speeds))
            high = min(high, int(np.searchsorted(costs.seconds, reach, "right")) - 1)
            low = max(low, int(np.searchsorted(costs.seconds, rest * (1 - TIE), "left")))
        return (low, high) if low <= high else None

    def exact(self, bound: float) -> tuple[int, ...] | None:
        """The order of kinds whose slowest stage is fastest; None where none is below the bound.

        `places[counts]` is of the orders of so many devices of each kind.
        """
        kinds = range(len(self._speeds))
        start = (0,) * len(self._speeds)
        places: dict[tuple[int, ...], _Places] = {start: {(-1, None): _Front(0, np.zeros(1))}}
        level = [start]
        for _ in range(self._costs.stages):
            following: dict[tuple[int, ...], None] = {}
            for counts in level:
                for kind in kinds:
                    if counts[kind] == self._kinds.counts[kind]:
                        continue
                    then = (*counts[:kind], counts[kind] + 1, *counts[kind + 1 :])
                    if self._place(places[counts], places.setdefault(then, {}), kind, then, bound):
                        following[then] = None
            level = list(following)
        found = places.get(self._kinds.counts, {})
        return self._backwards(places, bound) if found else None

    def _place(
        self, before: _Places, after: _Places, kind: int, placed: tuple[int, ...], bound: float
    ) -> bool:
        """Add a stage of this kind behind all orders; whether any stays below the bound."""
        any_placed = False
        for link, front in self._arriving(before, kind):
            behind = self._leaving(kind, placed)
            fronts = self._next(front, kind, link, behind, placed, bound)
            for one, found in zip(behind, fronts, strict=True):
                if found is not None:
                    after[kind, one] = _lesser(after.get((kind, one)), found)
                    any_placed = True
        return any_placed

    def _arriving(self, before: _Places, kind: int) -> Iterator[tuple[Link | None, _Front]]:
        """Orders that this kind may follow, by the link in front of it."""
        fronts: dict[Link | None, _Front] = {}
        for (last, behind), front in before.items():
            if last < 0 or self._kinds.links[last][kind] == behind:
                fronts[behind] = _lesser(fronts.get(behind), front)
        yield from fronts.items()

    def _leaving(self, kind: int, placed: Sequence[int]) -> Sequence[Link | None]:
        """Links that may lie behind this kind."""
        pairs = zip(self._kinds.links[kind], placed, self._kinds.counts, strict=True)
        found = dict.fromkeys(link for link, n, count in pairs if n < count)
        return list(found) or [None]

    def _backwards(self, places: dict[tuple[int, ...], _Places], bound: float) -> tuple[int, ...]:
        """The order that the least value comes from."""
        counts, behind, end, order = self._kinds.counts, None, self._costs.count, []
        while any(counts):
            found = []
            for kind, front in (
                (k, f) for (k, link), f in places[counts].items() if link == behind
            ):
                if order and self._kinds.links[kind][order[-1]] != behind:
                    continue
                if front.low <= end < front.low + len(front.values):
                    found.append((front.values[end - front.low], kind))
            _, kind = min(found)
            fewer = (*counts[:kind], counts[kind] - 1, *counts[kind + 1 :])
            steps = []
            for link, front in self._arriving(places[fewer], kind):
                links = (link, [behind])
                times = self._times(front, kind, links, sum(fewer), (end, end))[0, :, 0]
                slowest = np.maximum(front.values, times)
                at = int(slowest.argmin())
                steps.append((slowest[at], len(steps), link, front.low + at))
            _, _, behind, end = min(steps)
            order.append(kind)
            counts = fewer
        return tuple(order[::-1])


def _trimmed(low: int, values: np.ndarray) -> _Front | None:
    """Without what is infinite at both ends; None where all is."""
    found = np.flatnonzero(np.isfinite(values))
    return _Front(low + int(found[0]), values[found[0] : found[-1] + 1]) if len(found) else None


def _lesser(one: _Front | None, other: _Front) -> _Front:
    """The lesser of two fronts, layer by layer."""
    if one is None:
        return other
    low = min(one.low, other.low)
    high = max(front.low + len(front.values) for front in (one, other))
    values = np.full(high - low, np.inf)
    for front in (one, other):
        part = values[front.low - low : front.low - low + len(front.values)]
        np.minimum(part, front.values, out=part)
    return _Front(low, values)


def _tried(search: _Search, kinds: Kinds, chance: random.Random) -> tuple[tuple[int, ...], float]:
    """The best order found, and seconds of its slowest stage: from some sorted ones, by changes."""
    best, order = search.slowest(kinds.of), kinds.of
    for start in _sorted(kinds):
        found = search.slowest(start, best)
        best, order = (found, start) if found < best else (best, order)
    tries = FEW_TRIES if kinds.states <= EXACT_STATES else TRIES
    for _ in range(tries if len(kinds.counts) > 1 else 0):
        if best <= search.least * (1 + TIE):
            break
        changed = _changed(order, chance)
        found = search.slowest(changed, best)
        best, order = (found, changed) if found < best else (best, order)
    return order, best


def _sorted(kinds: Kinds) -> Iterator[tuple[int, ...]]:
    """By speed and by memory, both ways."""
    for key in (
        lambda kind: kinds.devices[kind].speed,
        lambda kind: _memory(kinds.devices[kind]),
    ):
        for sign in (1, -1):
            yield tuple(sorted(kinds.of, key=lambda kind: (sign * key(kind), kind)))


def _memory(device: StageDevice) -> float:
    return math.inf if device.memory_bytes is None else float(device.memory_bytes)


def _changed(order: Sequence[int], chance: random.Random) -> tuple[int, ...]:
    """Two unlike devices exchanged, or what lies between two turned round."""
    changed = list(order)
    while changed == list(order):
        a, b = sorted(chance.sample(range(len(order)), 2))
        if chance.random() < 0.5:
            changed[a], changed[b] = changed[b], changed[a]
        else:
            changed[a : b + 1] = changed[a : b + 1][::-1]
    return tuple(changed)
