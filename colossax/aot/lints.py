"""What a compiled program should not do, as findings a test can assert on.

Each function returns one sentence per finding and an empty list for a clean program:
`assert sync_transfers_in_loops(parse_module(program.hlo)) == []`.
"""

import re
from collections.abc import Collection, Iterable, Iterator

from jax.sharding import Mesh

from colossax.aot.collectives import SCALARS_BYTES, collectives, overlapped
from colossax.aot.compile import Program
from colossax.aot.hlo import HOST_SPACE, Instruction, Module, elements, runs_on_host, shape_bytes
from colossax.aot.traffic import operand_bytes
from colossax.aot.transfers import host_arguments, transfers

_REMATERIALISED = re.compile(
    r"involuntary full rematerialization\.\s*(.*?)(?:, metadata=|\. |\n|$)", re.I
)
_WHERE = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')

_CALLS = ("while", "call", "conditional")
_PLUMBING = (*_CALLS, "constant", *"parameter tuple get-tuple-element bitcast opt-barrier".split())
_COPIES = (*_PLUMBING, *"copy slice dynamic-slice dynamic-update-slice reshape".split())
"""What a kernel may do with host memory and yet compute nothing there."""


def full_rematerialisations(program: Program) -> list[str]:
    """Arrays the partitioner replicates because it knows no other way between two shardings."""
    findings = []
    for line in program.messages.splitlines():
        match = _REMATERIALISED.search(line)
        if match is not None:
            where = _WHERE.search(line)
            origin = f" ({where.group(1)})" if where else ""
            findings.append(f"involuntary full rematerialisation: {match.group(1)}{origin}")
    return findings


def host_copies(module: Module, *, larger_than: int = 0) -> list[str]:
    """Copies from host memory to host memory, such as of a whole stack of layers.

    Args:
        module: A compiled program.
        larger_than: Bytes up to which a copy is left alone.
    """
    findings = []
    for one in module.by_name.values():
        if one.opcode not in ("copy", "copy-start"):
            continue
        written = elements(one.shape)[0]
        size = shape_bytes(written)
        read = _operand_arrays(module, one)
        if size > larger_than and HOST_SPACE in written and all(HOST_SPACE in a for a in read):
            findings.append(f"{_named(module, one)} copies {size:,} bytes within host memory")
    return findings


def full_stack_copies(module: Module, stacks: Collection[int] | None = None) -> list[str]:
    """Copies of a whole stack of layers, in or out of loops and in any direction.

    A stack in host memory should move layer by layer; a copy of all of it takes as much memory
    again, on the device or on the host, and in a loop as often as the loop runs.

    Args:
        module: A compiled program.
        stacks: Bytes per device of each stack; by default of every argument in host memory.

    Raises:
        ValueError: A loop with transfers whose trip count is not known.
    """
    sizes = set(host_arguments(module) if stacks is None else stacks)
    return [
        f"'{one.name}'{_origin(one.op_name, one.source)} copies a whole stack of {one.bytes:,}"
        f" bytes, {one.direction.replace('_', ' ')}, {one.times} times"
        for one in transfers(module)
        if one.whole and one.bytes in sizes
    ]


def sync_transfers_in_loops(module: Module) -> list[str]:
    """Transfers between host and device that stop a loop until they are done.

    A transfer is asynchronous when it has a start and a done: `copy-start`, or a slice or update
    of a host array as `fusion-start` or within an `async-start`. Indices and other scalars are no
    transfers.
    """
    findings = []
    for one in _in_loops(module):
        if one.opcode in _PLUMBING or one.opcode.endswith(("-start", "-update", "-done")):
            continue
        written = [a for a in elements(one.shape) if shape_bytes(a) > SCALARS_BYTES]
        read = [a for a in _operand_arrays(module, one) if shape_bytes(a) > SCALARS_BYTES]
        on_host = [HOST_SPACE in array for array in (*written, *read)]
        if any(on_host) and not all(on_host):
            findings.append(
                f"{_named(module, one)} moves between host and device in a loop and is not"
                f" asynchronous"
            )
    return findings


def exposed_transfers(module: Module, *, larger_than: int = 0) -> list[str]:
    """Asynchronous transfers between host and device that no compute hides.

    Args:
        module: A compiled program.
        larger_than: Bytes up to which a transfer is left alone.
    """
    findings = []
    for one in module.by_name.values():
        size = _transfer_bytes(one)
        if size > larger_than and not overlapped(module, one):
            findings.append(
                f"{_named(module, one)} moves {size:,} bytes between host and device and no"
                f" compute runs before its end"
            )
    return findings


def exposed_collectives(module: Module, mesh: Mesh, *, larger_than: int = 0) -> list[str]:
    """Collectives that no compute hides: synchronous ones, or none between start and done.

    Args:
        module: A compiled program.
        mesh: The mesh it was compiled for.
        larger_than: Payload bytes per device and run up to which a collective is left alone.
    """
    return [
        f"{one.kind} along {one.axis} of {one.bytes // one.count:,} bytes is not hidden by"
        f" compute{_origin(one.op_name, one.source)}"
        for one in collectives(module, mesh)
        if not one.overlapped and one.bytes > larger_than * one.count
    ]


def unexpected_collectives(
    module: Module, mesh: Mesh, allowed: Collection[tuple[str, str]], *, larger_than: int = 0
) -> list[str]:
    """Collectives of another kind or along other axes than allowed.

    Args:
        module: A compiled program.
        mesh: The mesh it was compiled for.
        allowed: Pairs of kind and axis, such as `("all-gather", "fsdp")` and
            `("all-reduce", "data x fsdp")`.
        larger_than: Payload bytes per device and run up to which a collective is left alone.
    """
    return [
        f"{one.kind} along {one.axis} of {one.bytes // one.count:,} bytes is not expected"
        f"{_origin(one.op_name, one.source)}"
        for one in collectives(module, mesh)
        if (one.kind, one.axis) not in allowed and one.bytes > larger_than * one.count
    ]


def host_compute(module: Module) -> list[str]:
    """Operations that run on the host, and kernels that compute with host memory as operand.

    The former are annotated regions, callbacks, infeeds and outfeeds. The latter wait for the bus
    at each access.
    """
    findings = []
    scheduled = {one.name for one in _reached(module, [module.entry])}
    for one in module.by_name.values():
        reason = _host_reason(one)
        if reason:
            findings.append(f"{_named(module, one)} runs on the host: {reason}")
        elif one.name in scheduled and (opcode := _computes_from_host(module, one)):
            findings.append(f"{_named(module, one)} computes from host memory: {opcode}")
    return findings


def _computes_from_host(module: Module, one: Instruction) -> str:
    """What a scheduled instruction computes with an operand in host memory, or nothing."""
    if one.opcode in _COPIES or one.opcode.endswith(("-start", "-update", "-done")):
        return ""
    read = operand_bytes(module, one).values()
    if not any(HOST_SPACE in shape and size > SCALARS_BYTES for shape, size in read):
        return ""
    called = dict(one.called).get("calls") if one.opcode == "fusion" else None
    inside = module.computations[called] if called else (one,)
    computing = (i for i in inside if i.opcode not in _COPIES)
    return next((i.opcode for i in computing if shape_bytes(i.shape) > SCALARS_BYTES), "")


def _host_reason(instruction: Instruction) -> str:
    attributes = instruction.attributes
    target = re.search(r'custom_call_target="([^"]*)"', attributes)
    if target and re.search(r"HostExecute|python_\w*callback", target.group(1)):
        return f"custom call to {target.group(1)}"
    if re.search(r'_xla_compute_type="?host"?', attributes):
        return "annotated so"
    if instruction.opcode in ("infeed", "outfeed"):
        return instruction.opcode
    if instruction.opcode in ("send", "recv") and "is_host_transfer=true" in attributes:
        return "it exchanges values with a callback"
    return ""


def _in_loops(module: Module) -> Iterator[Instruction]:
    """Instructions of loop bodies and of what they call."""
    loops = (one for one in module.by_name.values() if one.opcode == "while")
    return _reached(module, [called for one in loops for _, called in one.called])


def _reached(module: Module, names: Iterable[str]) -> Iterator[Instruction]:
    """Instructions of computations and what they call; fusions and async parts are not opened."""
    waiting, seen = list(names), set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for one in module.computations[name]:
            yield one
            if one.opcode in _CALLS and not runs_on_host(one):
                waiting += [called for _, called in one.called]


def _transfer_bytes(start: Instruction) -> int:
    """Bytes that a start moves between the memories; 0 where it is no such start.

    `copy-start` gives (to, from, context), `async-start` and `fusion-start` ((operands), result,
    context). A slice is as large as its result on the device, an update as its largest operand
    there.
    """
    if not start.opcode.endswith("-start") or not start.in_host_memory:
        return 0
    first, second = elements(start.shape)[:2]
    written, read = (first, second) if start.opcode == "copy-start" else (second, first)
    if HOST_SPACE not in written:
        return shape_bytes(written)
    on_device = [shape_bytes(array) for array in elements(read) if HOST_SPACE not in array]
    return max((size for size in on_device if size > SCALARS_BYTES), default=0)


def _operand_arrays(module: Module, instruction: Instruction) -> list[str]:
    shapes = module.operand_shapes(instruction)
    return [array for shape in shapes for array in elements(shape)]


def _named(module: Module, instruction: Instruction) -> str:
    origin = _origin(instruction.op_name, module.source(instruction))
    return f"{instruction.opcode} '{instruction.name}'{origin}"


def _origin(op_name: str, source: str) -> str:
    parts = ", ".join(part for part in (op_name, source) if part)
    return f" ({parts})" if parts else ""
