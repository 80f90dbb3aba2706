"""Devices by what tells them apart as stages of a pipeline."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from colossax.errors import InputError
from colossax.pipeline.cuts import Link, StageDevice

Links = Sequence[Sequence[Link]]
"""`links[a][b]` lies between devices a and b, as numbered when given; `links[a][a]` is not read."""


class Kinds:
    """Devices by what tells them apart.

    Attributes:
        of: The kind of each device.
        devices: One of each kind.
        counts: How many there are of each.
        links: `[a][b]` between kinds.
    """

    def __init__(self, devices: Sequence[StageDevice], links: Links | None):
        size = len(devices)
        if links is not None:
            _check(links, size)
        self.of: tuple[int, ...] = ()
        firsts: list[int] = []
        for number in range(size):
            alike = [k for k, one in enumerate(firsts) if _alike(devices, links, one, number)]
            self.of += (alike[0] if alike else len(firsts),)
            firsts += [] if alike else [number]
        self.devices = [devices[one] for one in firsts]
        self.counts = tuple(self.of.count(kind) for kind in range(len(firsts)))
        self._members = [[n for n in range(size) if self.of[n] == k] for k in range(len(firsts))]
        self.links = [[_between(links, a, b) for b in self._members] for a in self._members]

    @property
    def states(self) -> int:
        """Of the exact search."""
        return math.prod(count + 1 for count in self.counts)

    def numbered(self, order: Sequence[int]) -> tuple[int, ...]:
        """Devices of these kinds, those of one kind as they were given."""
        members = [iter(each) for each in self._members]
        return tuple(next(members[kind]) for kind in order)


def _alike(devices: Sequence[StageDevice], links: Links | None, a: int, b: int) -> bool:
    """Whether exchanging two devices changes nothing."""
    one, other = (dataclasses.replace(devices[n], kind="") for n in (a, b))
    if one != other or links is None:
        return one == other
    rest = (n for n in range(len(devices)) if n not in (a, b))
    return all(links[a][n] == links[b][n] and links[n][a] == links[n][b] for n in rest)


def _between(links: Links | None, a: Sequence[int], b: Sequence[int]) -> Link:
    """Of two kinds, which may be one: then two of its devices, where there are two."""
    if links is None:
        return Link()
    pairs = [(one, other) for one in a[:2] for other in b[:2] if one != other]
    return links[pairs[0][0]][pairs[0][1]] if pairs else Link()


def _check(links: Links, size: int) -> None:
    if {len(links), *map(len, links)} != {size}:
        raise InputError(
            f"links: found {len(links)} rows of {sorted({*map(len, links)})} for {size} devices;"
            f" give {size} x {size}"
        )
    for a, b in itertools.combinations(range(size), 2):
        if links[a][b] != links[b][a]:
            raise InputError(
                f"links: from device {a} to {b} another than back; give one for both ways, the"
                " slower"
            )
