"""What a compiled program sends between devices: counts and bytes per mesh axis."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from colossax.aot.groups import (
    Groups,
    axes_of,
    groups_of_pairs,
    parse_groups,
    parse_pairs,
    smallest_axes,
)
from colossax.aot.hlo import Instruction, Module, elements, parse_module, shape_bytes

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_SKIPPED = (*KINDS, "reduce", "reduce-window", "select-and-scatter", "sort", "scatter", "map")
"""Their computations combine two numbers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective instruction.

    Attributes:
        kind: One of `KINDS`.
        axes: Mesh axes it runs along, outer first; empty where its groups are no product of axes.
        group_size: Devices that exchange with each other.
        count: Times it runs per call of the program.
        bytes: Payload per device of all those times: the result of an all-gather, the operand of
            every other kind (of a ragged all-to-all the most it can be).
        ring_bytes: What a device sends of it in a ring: `(g - 1) / g` of the payload, twice that
            for an all-reduce, all of it for a permute.
        overlapped: Whether compute is scheduled between its start and its end; None where it is
            one instruction.
        conditional: Whether it lies in a branch, and so may run less often.
        op_name: Path of the operation in the traced program.
        source: `file.py:line`.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    count: int
    bytes: int
    ring_bytes: float
    overlapped: bool | None
    conditional: bool
    op_name: str
    source: str

    @property
    def axis(self) -> str:
        """`fsdp`, `data x fsdp`, or `groups of 4` where they are no axes."""
        return " x ".join(self.axes) or f"groups of {self.group_size}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Totals:
    """Several collectives of one kind along the same axes.

    The exposed ones are those beside which nothing is computed.
    """

    axis: str
    kind: str
    count: int
    bytes: int
    ring_bytes: int
    exposed_count: int
    exposed_ring_bytes: int
    group_size: int

    @property
    def overlapped(self) -> bool:
        """Whether compute stands beside all but a hundredth of the bytes."""
        return self.exposed_ring_bytes <= 0.01 * self.ring_bytes


def collectives(program: str | Module, mesh: Mesh) -> tuple[Collective, ...]:
    """Every collective that moves bytes, in the order of the text.

    Asynchronous pairs count once, bodies of loops as often as the loop runs, both branches of a
    conditional once each (`conditional` marks them), groups of one device not at all.

    Args:
        program: A compiled program, or the text of one, for CPU or GPU.
        mesh: The mesh it was compiled for.

    Raises:
        ValueError: Something is not understood: groups, an element type, a loop with collectives
            whose trip count is not known.
    """
    module = parse_module(program) if isinstance(program, str) else program
    ops = []
    for ran in _walk(module, module.entry, _Run(times=1)):
        one = _collective(module, ran, mesh)
        if one is not None:
            ops.append(one)
    return tuple(ops)


def exchanging(program: str | Module, mesh: Mesh) -> Iterator[tuple[str, tuple[str, ...], Groups]]:
    """Kind, mesh axes and groups of each collective, wherever it stands and whether it runs or not.

    Groups are of positions in the mesh; those of one device are left out, and a permute's are what
    it connects.

    Args:
        program: See `collectives`.
        mesh: Likewise.

    Raises:
        ValueError: Groups are not understood, or devices talk in another way.
    """
    module = parse_module(program) if isinstance(program, str) else program
    for instruction in itertools.chain.from_iterable(module.computations.values()):
        _check_counted(instruction)
        kind = _kind(instruction)
        if kind is not None:
            groups, axes = _groups(kind, instruction, mesh)
            groups = tuple(group for group in groups if len(group) > 1)
            if groups:
                yield kind, axes, groups


def totals(ops: Sequence[Collective]) -> tuple[Totals, ...]:
    """Sums per kind and axes, most bytes first."""
    keys = dict.fromkeys((c.kind, c.axis) for c in ops)
    sums = []
    for kind, axis in keys:
        same = [c for c in ops if (c.kind, c.axis) == (kind, axis)]
        exposed = [c for c in same if not c.overlapped]
        sums.append(
            Totals(
                axis=axis,
                kind=kind,
                count=sum(c.count for c in same),
                bytes=sum(c.bytes for c in same),
                ring_bytes=round(sum(c.ring_bytes for c in same)),
                exposed_count=sum(c.count for c in exposed),
                exposed_ring_bytes=round(sum(c.ring_bytes for c in exposed)),
                group_size=max(c.group_size for c in same),
            )
        )
    return tuple(sorted(sums, key=lambda t: -t.ring_bytes))


def assert_collectives(
    compiled: Any,
    expected: Mapping[tuple[str, str], float | int],
    *,
    mesh: Mesh,
    within: float = 0.02,
    ignore_below: int = 0,
) -> None:
    """Assert payload bytes per (kind, axis), such as `{("all-gather", "fsdp"): 1.5e9}`.

    Args:
        compiled: A compiled function or the text of one.
        expected: Bytes per device and call; pairs that are not named must not occur.
        mesh: The mesh it was compiled for.
        within: Largest relative difference.
        ignore_below: Pairs of fewer bytes, found but not expected, are left alone.

    Raises:
        AssertionError: With every pair that differs, and the operations behind it.
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    ops = collectives(text, mesh)
    sums = {(t.kind, t.axis): t.bytes for t in totals(ops)}
    wrong = []
    for pair in sorted({*sums, *expected}):
        got, want = sums.get(pair, 0), expected.get(pair, 0)
        if pair not in expected and got < ignore_below:
            continue
        if abs(got - want) > within * want:
            names = {f"{c.op_name} ({c.source})" for c in ops if (c.kind, c.axis) == pair}
            wrong.append(f"{pair[0]} along {pair[1]}: {got:,} bytes, expected {want:,.0f}")
            wrong += [f"    {name}" for name in sorted(names)]
    assert not wrong, "\n".join(["collectives differ", *wrong])


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    """How an instruction runs: times per call, within a branch, between which start and done."""

    times: int
    conditional: bool = False
    start: Instruction | None = None


_ALWAYS = ("calls", "to_apply", "body", "condition")


def _walk(module: Module, name: str, run: _Run) -> Iterator[tuple[Instruction, _Run]]:
    """Every instruction that runs.

    Raises:
        ValueError: Devices talk in a way that is not counted.
    """
    for instruction in module.computations[name]:
        opcode = instruction.opcode
        _check_counted(instruction)
        started = instruction if opcode.endswith("-start") else run.start
        yield instruction, dataclasses.replace(run, start=started)
        if opcode.removesuffix("-start") in _SKIPPED or opcode.endswith(("-done", "-update")):
            continue  # combines two numbers, or names the computation of its start once more
        for role, called in instruction.called:
            times = run.times * _trips(module, instruction, role, called)
            branch = run.conditional or role not in _ALWAYS
            inner = dataclasses.replace(run, times=times, conditional=branch, start=started)
            yield from _walk(module, called, inner)


def _check_counted(instruction: Instruction) -> None:
    opcode = instruction.opcode
    if opcode in ("send", "recv") and "is_host_transfer=true" not in instruction.attributes:
        raise ValueError(f"HLO line {instruction.line}: '{opcode}' between devices is not counted")


def _trips(module: Module, loop: Instruction, role: str, called: str) -> int:
    """Times an instruction runs one of its computations; a loop asks once more than it runs."""
    if role not in ("body", "condition"):
        return 1
    if loop.trip_count is not None:
        return loop.trip_count + (role == "condition")
    inside = _walk(module, called, _Run(times=1))
    sent = next((one.name for one, _ in inside if _kind(one) is not None), None)
    if sent is not None:
        raise ValueError(
            f"HLO line {loop.line}: loop '{loop.name}' has no known trip count and runs {sent};"
            f" how often cannot be told"
        )
    return 1


def _kind(instruction: Instruction) -> str | None:
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in KINDS else None


def _collective(module: Module, ran: tuple[Instruction, _Run], mesh: Mesh) -> Collective | None:
    instruction, run = ran
    kind = _kind(instruction)
    if kind is None:
        return None
    groups, axes = _groups(kind, instruction, mesh)
    size = max((len(group) for group in groups), default=1)
    if size == 1:
        return None
    payload = _payload(module, instruction, kind)
    return Collective(
        kind=kind,
        axes=axes,
        group_size=size,
        count=run.times,
        bytes=payload * run.times,
        ring_bytes=_ring_share(kind, size) * payload * run.times,
        overlapped=None if run.start is None else overlapped(module, run.start),
        conditional=run.conditional,
        op_name=instruction.op_name,
        source=module.source(instruction),
    )


def _groups(kind: str, instruction: Instruction, mesh: Mesh) -> tuple[Groups, tuple[str, ...]]:
    try:
        if kind == "collective-permute":
            groups = groups_of_pairs(parse_pairs(instruction.attributes))
            _check_devices(groups, mesh, all_of_them=False)
            return groups, axes_of(groups, mesh) or smallest_axes(groups, mesh)
        groups = parse_groups(instruction.attributes, mesh.devices.size)
        _check_devices(groups, mesh, all_of_them=kind != "collective-broadcast")
    except ValueError as problem:
        raise ValueError(f"HLO line {instruction.line}: {problem}") from problem
    return groups, axes_of(groups, mesh)


def _check_devices(groups: Groups, mesh: Mesh, *, all_of_them: bool) -> None:
    """Groups of replicas, or of another mesh, would be counted along the wrong axes."""
    named = sorted(device for group in groups for device in group)
    devices = list(range(mesh.devices.size))
    if not set(named) <= set(devices) or (all_of_them and named != devices):
        raise ValueError(f"groups {groups} do not fit a mesh of {len(devices)} devices")


def _ring_share(kind: str, size: int) -> float:
    if kind in ("collective-permute", "collective-broadcast"):
        return 1.0
    return (2 if kind == "all-reduce" else 1) * (size - 1) / size


def _payload(module: Module, instruction: Instruction, kind: str) -> int:
    """Bytes of an all-gather's result, of any other kind's operands."""
    if kind != "all-gather":
        shapes = module.operand_shapes(instruction)
        if kind == "ragged-all-to-all":
            shapes = shapes[:1]  # the others are where to write, offsets and sizes
        return sum(map(shape_bytes, shapes))
    if instruction.opcode == kind:
        return shape_bytes(instruction.shape)
    # A start gives (operands, results, ...), each a tuple of its own where there are several.
    return shape_bytes(elements(instruction.shape)[1])


_IDLE = (
    "parameter constant tuple get-tuple-element bitcast copy-start copy-done after-all"
    " opt-barrier partition-id replica-id add-dependency domain"
).split()
SCALARS_BYTES = 64
"""What reads and writes no more than this, such as a loop's counter, hides nothing."""


def overlapped(module: Module, start: Instruction) -> bool:
    """Whether anything that computes is scheduled between a start and its done.

    Raises:
        ValueError: Nothing in its computation ends it.
    """
    return next(computed_beside(module, start), None) is not None


def computed_beside(module: Module, start: Instruction) -> Iterator[Instruction]:
    """What computes between a start and its done, in the order of the schedule.

    Raises:
        ValueError: Nothing in its computation ends it.
    """
    body = next(b for b in module.computations.values() if start in b)
    names = {start.name}
    for instruction in body[body.index(start) + 1 :]:
        operands = names.intersection(name.split("#")[0] for name in instruction.operand_names)
        if operands and instruction.opcode.endswith("-done"):
            return
        if operands and instruction.opcode.endswith("-update"):
            names.add(instruction.name)
        if _computes(module, instruction):
            yield instruction
    raise ValueError(f"HLO line {start.line}: nothing ends '{start.name}'")


def _computes(module: Module, instruction: Instruction) -> bool:
    opcode = instruction.opcode
    if opcode in _IDLE or opcode.endswith(("-start", "-update", "-done")):
        return False
    if _kind(instruction) is not None:
        return False
    read = module.operand_shapes(instruction)
    return sum(map(shape_bytes, (instruction.shape, *read))) > SCALARS_BYTES
