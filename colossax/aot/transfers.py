"""What a compiled program copies between the memory of a GPU and that of its host."""

import dataclasses
import re
from collections.abc import Iterator, Sequence

from colossax.aot.collectives import SCALARS_BYTES, computed_beside
from colossax.aot.hlo import (
    HOST_SPACE,
    Instruction,
    Module,
    elements,
    parse_module,
    runs_on_host,
    shape_bytes,
)
from colossax.aot.traffic import operand_bytes, result_bytes

TO_DEVICE, TO_HOST, HOST_TO_HOST = "to_device", "to_host", "host_to_host"
DIRECTIONS = (TO_DEVICE, TO_HOST, HOST_TO_HOST)

_CALLS = ("while", "call", "conditional")
_ALWAYS = ("calls", "to_apply", "body", "condition")
_STILL = (*_CALLS, *"parameter constant tuple get-tuple-element bitcast opt-barrier".split())
_MATMULS = ("dot", "convolution", "ragged-dot")
_MATMUL_CALLS = re.compile(r"gemm|matmul|conv|fmha", re.I)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer:
    """One instruction that copies to or from host memory.

    Attributes:
        direction: One of `DIRECTIONS`.
        bytes: Of one execution, on one device: of a slice or an update only that.
        times: Executions per call of the program.
        asynchronous: Whether it has a start and a done, between which other work may run.
        in_loop: Whether it lies in the body of a loop.
        conditional: Whether it lies in a branch, and so may run less often.
        beside: Names of what computes between its start and its done.
        matmuls: How many of those multiply matrices: matmuls and convolutions, fusions and loops
            that contain one, calls of cuBLAS and cuDNN.
        shape: Of the array on the host, whole.
        name: Of the instruction.
        op_name: Path of the operation in the traced program.
        source: `file.py:line`.
    """

    direction: str
    bytes: int
    times: int
    asynchronous: bool
    in_loop: bool
    conditional: bool
    beside: tuple[str, ...]
    matmuls: int
    shape: str
    name: str
    op_name: str
    source: str

    @property
    def total_bytes(self) -> int:
        """Of all executions."""
        return self.bytes * self.times

    @property
    def whole(self) -> bool:
        """Whether it copies the whole array, not a slice of it."""
        return self.bytes == shape_bytes(self.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransferTotals:
    """All transfers in one direction, per device and call of the program.

    Attributes:
        executions: How often any of them runs.
        bytes: Of all executions.
        sync_in_loops: Executions that stop a loop until they are done.
        beside_matmul: Executions during which at least one matmul is scheduled.
        exposed_bytes: Of executions during which nothing computes.
    """

    direction: str
    executions: int
    bytes: int
    sync_in_loops: int
    beside_matmul: int
    exposed_bytes: int


def transfers(program: str | Module) -> tuple[Transfer, ...]:
    """Every copy between device and host memory, and within host memory, in schedule order.

    Asynchronous pairs count once, bodies of loops as often as the loop runs, all branches of a
    conditional once each. A kernel that reads or writes host memory itself is a synchronous
    transfer of what it touches. What computes within host memory is none
    (`lints.host_compute` finds it), nor is an allocation there.

    Args:
        program: A compiled program, or the text of one.

    Raises:
        ValueError: A loop with transfers whose trip count is not known.
    """
    module = parse_module(program) if isinstance(program, str) else program
    return tuple(
        _transfer(module, one, run, *moved)
        for one, run in _walk(module, module.entry, _Run())
        for moved in _moved(module, one)
    )


def transfer_totals(copies: Sequence[Transfer]) -> tuple[TransferTotals, ...]:
    """Sums per direction, in the order of `DIRECTIONS`; one without transfers is left out."""
    sums = []
    for direction in DIRECTIONS:
        same = [t for t in copies if t.direction == direction]
        if same:
            sums.append(
                TransferTotals(
                    direction=direction,
                    executions=sum(t.times for t in same),
                    bytes=sum(t.total_bytes for t in same),
                    sync_in_loops=sum(t.times for t in same if t.in_loop and not t.asynchronous),
                    beside_matmul=sum(t.times for t in same if t.matmuls),
                    exposed_bytes=sum(t.total_bytes for t in same if not t.beside),
                )
            )
    return tuple(sums)


def host_arguments(program: str | Module) -> tuple[int, ...]:
    """Bytes per device of each argument that lies in host memory."""
    module = parse_module(program) if isinstance(program, str) else program
    return tuple(
        shape_bytes(one.shape)
        for one in module.computations[module.entry]
        if one.opcode == "parameter" and one.in_host_memory
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    """How an instruction runs: times per call of the program (None: unknown), where."""

    times: int | None = 1
    in_loop: bool = False
    conditional: bool = False


def _walk(module: Module, name: str, run: _Run) -> Iterator[tuple[Instruction, _Run]]:
    """Every instruction of the schedule; fusions and asynchronous parts are not opened."""
    for one in module.computations[name]:
        if one.opcode not in _CALLS:
            yield one, run
            continue
        if runs_on_host(one):
            continue
        for role, called in one.called:
            times = run.times
            if one.opcode == "while":
                trips = one.trip_count
                known = trips is not None and times is not None
                times = times * (trips + (role == "condition")) if known else None  # type: ignore[operator]
            inner = _Run(
                times=times,
                in_loop=run.in_loop or one.opcode == "while",
                conditional=run.conditional or role not in _ALWAYS,
            )
            yield from _walk(module, called, inner)


def _transfer(
    module: Module, one: Instruction, run: _Run, direction: str, size: int, shape: str
) -> Transfer:
    if run.times is None:
        raise ValueError(
            f"HLO line {one.line}: '{one.name}' copies to or from host memory in a loop without a"
            f" known trip count; how often cannot be told"
        )
    asynchronous = one.opcode.endswith("-start")
    beside = tuple(computed_beside(module, one)) if asynchronous else ()
    return Transfer(
        direction=direction,
        bytes=size,
        times=run.times,
        asynchronous=asynchronous,
        in_loop=run.in_loop,
        conditional=run.conditional,
        beside=tuple(other.name for other in beside),
        matmuls=sum(_multiplies(module, other) for other in beside),
        shape=shape,
        name=one.name,
        op_name=one.op_name,
        source=module.source(one),
    )


def _moved(module: Module, one: Instruction) -> list[tuple[str, int, str]]:
    """(direction, bytes, shape of the array on the host) of what an instruction copies."""
    if one.opcode in _STILL or one.opcode.endswith(("-done", "-update")):
        return []
    if not any(HOST_SPACE in shape for shape in (one.shape, *module.operand_shapes(one))):
        return []
    work = _work(module, one)
    if "AllocateBuffer" in work.attributes or runs_on_host(one) or runs_on_host(work):
        return []
    # Beside a copy of an array stand indices and counters; a copy of a scalar stands alone.
    least = 0 if work.opcode == "copy" else SCALARS_BYTES
    read = [array for array in operand_bytes(module, work).values() if array[1] > least]
    written = [array for array in result_bytes(module, work) if array[1] > least]
    fetched = [array for array in read if HOST_SPACE in array[0]]
    stored = [array for array in written if HOST_SPACE in array[0]]
    if not fetched and not stored:
        return []
    on_device = len(fetched) < len(read) or len(stored) < len(written)
    if fetched and stored and not on_device:
        return [(HOST_TO_HOST, *_sum(stored))]
    moves = [(TO_DEVICE, *_sum(fetched))] if fetched and len(stored) < len(written) else []
    return [*moves, (TO_HOST, *_sum(stored))] if stored else moves


def _sum(arrays: Sequence[tuple[str, int]]) -> tuple[int, str]:
    """Bytes of all, and the shape of the array with most of them."""
    return sum(size for _, size in arrays), max(arrays, key=lambda array: array[1])[0]


def _work(module: Module, one: Instruction) -> Instruction:
    """What a start sets going, as if it were synchronous; anything else itself.

    `copy-start` gives (to, from, context), every other start ((operands), result, context).
    """
    if not one.opcode.endswith("-start"):
        return one
    opcode = one.opcode.removesuffix("-start")
    if opcode == "async":
        return module.computations[dict(one.called)["calls"]][-1]
    result = elements(one.shape)[0 if opcode == "copy" else 1]
    return dataclasses.replace(one, opcode=opcode, shape=result)


def _multiplies(module: Module, one: Instruction) -> bool:
    """Whether an instruction multiplies matrices, itself or in what it calls."""
    if one.opcode in _MATMULS:
        return True
    target = re.search(r'custom_call_target="([^"]*)"', one.attributes)
    if target and _MATMUL_CALLS.search(target.group(1)):
        return True
    inside = (other for _, called in one.called for other in module.computations[called])
    return any(_multiplies(module, other) for other in inside)
