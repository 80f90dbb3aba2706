"""What the compiler says about memory: its dumps of the buffer assignment and of live ranges.

`--xla_dump_to` writes both as text, also without a device. The assignment tells which values lie
where in which allocation; the live ranges tell from which to which instruction of the flattened
schedule (a loop's body stands before the loop) each value is needed.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

Value = tuple[str, tuple[int, ...]]
"""An array of a program: the instruction that makes it and the place in its result's tuple."""

HOST_COLOR = 5
"""Memory space of host arrays; all others are the device's."""

_ALLOCATION = re.compile(r"allocation (\d+): size (\d+)(?:, color (\d+))?(.*):$")
_ASSIGNED = re.compile(
    r"\s+value: <\d+ ([^\s{}]+)(\{[\d, ]*\})?(?: \(phi\))? @(\d+)>"
    r" \(size=(\d+),offset=(\d+)\): (.+)$"
)
_RANGE = re.compile(r"\s+([^\s{}]+)(\{[\d, ]*\}):(\d+)-(\d+)$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assigned:
    """One value's place within an allocation."""

    value: Value
    bytes: int
    offset: int
    shape: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Allocation:
    """One contiguous piece of memory and the values that lie in it at some time.

    Attributes:
        number: Of the allocation, from 0.
        bytes: Its size.
        kind: `argument`, `temp`, `output`, `constant` or `thread-local`.
        parameter: Number of the program's argument that it is, or None.
        host: Whether it lies in host memory.
        values: In the order of the text.
    """

    number: int
    bytes: int
    kind: str
    parameter: int | None
    host: bool
    values: tuple[Assigned, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LiveRange:
    """First and last instruction of the schedule, both included, that need a value."""

    start: int
    end: int


def parse_assignment(text: str) -> tuple[Allocation, ...]:
    """Read a `*-buffer-assignment.txt`.

    Raises:
        ValueError: The text is no buffer assignment, or a line of it cannot be read.
    """
    lines = text.splitlines()
    if not lines or lines[0].strip() != "BufferAssignment:":
        raise ValueError(f"buffer assignment, line 1: no heading: {''.join(lines[:1])[:120]!r}")
    end = next((i for i, line in enumerate(lines) if not line.strip()), len(lines))
    heads = [i for i in range(1, end) if not lines[i].startswith(" ")]
    if heads[:1] != [1]:
        raise ValueError("buffer assignment, line 2: no allocation")
    return tuple(
        _allocation(lines, head, after)
        for head, after in zip(heads, [*heads[1:], end], strict=True)
    )


def _allocation(lines: Sequence[str], head: int, after: int) -> Allocation:
    match = _ALLOCATION.match(lines[head])
    if match is None:
        raise ValueError(f"buffer assignment, line {head + 1}: {lines[head][:120]!r}")
    number, size, color, notes = match.groups()
    parameter = re.search(r", parameter (\d+)\b", notes)
    values = [_assigned(lines[i], i + 1) for i in range(head + 1, after)]
    colors = {int(color or 0), *(c for c, _ in values)}
    return Allocation(
        number=int(number),
        bytes=int(size),
        kind="argument" if parameter else _kind(notes, head + 1),
        parameter=int(parameter.group(1)) if parameter else None,
        host=HOST_COLOR in colors,
        values=tuple(value for _, value in values),
    )


def _kind(notes: str, line: int) -> str:
    kinds = {
        ", constant": "constant",
        ", thread-local": "thread-local",
        ", preallocated-temp": "temp",
        ", output shape is": "output",
        ", maybe-live-out": "output",
    }
    for note, kind in kinds.items():
        if note in notes:
            return kind
    raise ValueError(f"buffer assignment, line {line}: an unknown kind of allocation{notes[:100]}")


def _assigned(line: str, number: int) -> tuple[int, Assigned]:
    match = _ASSIGNED.match(line)
    if match is None:
        raise ValueError(f"buffer assignment, line {number}: no value: {line[:120]!r}")
    name, index, color, size, offset, shape = match.groups()
    return int(color), Assigned(
        value=(name, _index(index)), bytes=int(size), offset=int(offset), shape=shape
    )


def _index(text: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in (text or "{}")[1:-1].split(",") if part)


def parse_live_ranges(text: str) -> Mapping[Value, LiveRange]:
    """Read the part `BufferLiveRange` of a `*-live-range.txt`.

    Raises:
        ValueError: There is no such part, or a line of it cannot be read.
    """
    lines = text.splitlines()
    titles = [i for i, line in enumerate(lines) if re.match(r"  \S", line)]
    start = next((i for i in titles if lines[i].strip() == "BufferLiveRange:"), None)
    if start is None:
        raise ValueError("live ranges: the text has no part 'BufferLiveRange:'")
    end = next((i for i in titles if i > start), len(lines))
    ranges: dict[Value, LiveRange] = {}
    for number in range(start + 1, end):
        match = _RANGE.match(lines[number])
        if match is None:
            raise ValueError(f"live ranges, line {number + 1}: {lines[number][:120]!r}")
        name, index, first, last = match.groups()
        ranges[name, _index(index)] = LiveRange(start=int(first), end=int(last))
    return ranges


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peak:
    """The instant at which live values cover most of an allocation.

    Attributes:
        time: Number of the instruction in the flattened schedule.
        bytes: Storage covered by at least one live value; storage that several share counts once.
        live: Values live then.
    """

    time: int
    bytes: int
    live: tuple[Assigned, ...]


def find_peak(values: Sequence[Assigned], ranges: Mapping[Value, LiveRange]) -> Peak:
    """When, first, the values of one allocation cover most of it.

    Raises:
        ValueError: A value has no live range.
    """
    live = _live_at_starts(values, ranges)
    best = Peak(time=0, bytes=0, live=())
    # Sums count shared storage twice, so they bound what is covered: most instants need no look.
    for bound, time in sorted((-sum(v.bytes for v in vs), time) for time, vs in live.items()):
        if -bound < best.bytes:
            break
        occupied = covered((v.offset, v.bytes) for v in live[time])
        if (-occupied, time) < (-best.bytes, best.time) or not best.live:
            best = Peak(time=time, bytes=occupied, live=tuple(live[time]))
    return best


def _live_at_starts(
    values: Sequence[Assigned], ranges: Mapping[Value, LiveRange]
) -> dict[int, list[Assigned]]:
    """Live values at each instant at which one begins to live."""
    for value in values:
        if value.value not in ranges:
            name, index = value.value
            raise ValueError(f"live ranges: none for {name}{{{','.join(map(str, index))}}}")
    waiting = sorted(values, key=lambda v: ranges[v.value].start)
    live: list[Assigned] = []
    at: dict[int, list[Assigned]] = {}
    for value in waiting:
        time = ranges[value.value].start
        live = [v for v in live if ranges[v.value].end >= time]
        live.append(value)
        at[time] = live
    return at


def covered(spans: Iterable[tuple[int, int]]) -> int:
    """Bytes in the union of spans (offset, bytes)."""
    total, reached = 0, 0
    for offset, size in sorted(spans):
        total += max(0, offset + size - max(offset, reached))
        reached = max(reached, offset + size)
    return total
