"""Bytes that a compiled program reads from memory and writes to it, instruction by instruction."""

import dataclasses
from collections.abc import Iterator

from colossax.aot.hlo import Instruction, Module, elements, parse_module, shape_bytes

_FREE = (
    "parameter constant tuple get-tuple-element bitcast after-all opt-barrier partition-id"
    " replica-id add-dependency domain"
).split()
_RUNS_OTHERS = ("while", "conditional", "call", "async-start")
"""They move nothing but what their computations move."""

_SLICES = ("dynamic-slice", "slice", "gather")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """What one scheduled instruction moves; a fusion is one instruction.

    Attributes:
        name: Of the instruction.
        opcode: `fusion`, `custom-call`, ...
        count: Times it runs per call of the program.
        read_bytes: Of all those times: each operand once, of what is only sliced the slices.
        written_bytes: Of all those times: the result, of what is updated in place the update.
        op_name: Path of the operation in the traced program.
    """

    name: str
    opcode: str
    count: int
    read_bytes: int
    written_bytes: int
    op_name: str

    @property
    def bytes(self) -> int:
        """Read and written."""
        return self.read_bytes + self.written_bytes


def traffic(program: str | Module) -> tuple[Traffic, ...]:
    """Every instruction that moves bytes, in the order of the schedule.

    Bodies of loops count as often as the loop runs, all branches of a conditional once each,
    asynchronous pairs once: reading at the start, writing at the end. Memory is that of the device
    or the host; a cache is not modelled, so what the next kernel still finds in one counts again.
    Calls to libraries count their workspace as written.

    Args:
        program: A compiled program, or the text of one.

    Raises:
        ValueError: A loop whose trip count is not known.
    """
    module = parse_module(program) if isinstance(program, str) else program
    return tuple(_walk(module, module.entry, 1))


def _walk(module: Module, name: str, times: int) -> Iterator[Traffic]:
    for one in module.computations[name]:
        if one.opcode in _FREE or one.opcode == "async-done":
            continue
        if one.opcode in _RUNS_OTHERS:
            for role, called in one.called:
                yield from _walk(module, called, times * _trips(one, role))
            continue
        read = 0 if one.opcode.endswith(("-done", "-update")) else _read(module, one)
        written = 0 if one.opcode.endswith(("-start", "-update")) else _written(module, one)
        if read or written:
            yield Traffic(
                name=one.name,
                opcode=one.opcode,
                count=times,
                read_bytes=read * times,
                written_bytes=written * times,
                op_name=one.op_name,
            )


def _trips(one: Instruction, role: str) -> int:
    """Times an instruction runs one of its computations; a loop asks once more than it runs."""
    if one.opcode != "while":
        return 1
    if one.trip_count is None:
        raise ValueError(
            f"HLO line {one.line}: loop '{one.name}' has no known trip count; its bytes cannot be"
            f" told"
        )
    return one.trip_count + (role == "condition")


def _read(module: Module, one: Instruction) -> int:
    return sum(size for _, size in operand_bytes(module, one).values())


def operand_bytes(module: Module, one: Instruction) -> dict[str, tuple[str, int]]:
    """Shape of each operand and the bytes looked at, once however often it is named.

    Of what is only sliced those are the slices, of what is updated in place none.
    """
    inside = _fused(module, one)
    most: dict[str, tuple[str, int]] = {}
    places = zip(one.operand_names, module.operand_shapes(one), strict=True)
    for place, (name, shape) in enumerate(places):
        full = shape_bytes(shape)
        if inside:
            parameter = next(
                i.name for i in inside if i.opcode == "parameter" and i.operands == str(place)
            )
            size = min(full, _used(inside, parameter, full))
        else:
            size = min(full, _used((one,), name, full))
        most[name] = (shape, max(most.get(name, (shape, 0))[1], size))
    return most


def _fused(module: Module, one: Instruction) -> tuple[Instruction, ...]:
    """Instructions of a fusion; of anything else none."""
    called = dict(one.called).get("calls") if one.opcode == "fusion" else None
    return module.computations[called] if called else ()


def _used(users: tuple[Instruction, ...], name: str, full: int) -> int:
    """Bytes of a value that instructions look at, if they look at slices of it only."""
    total = 0
    for user in users:
        if name not in user.operand_names:
            continue
        alone = user.operand_names.index(name) == 0 and user.operand_names.count(name) == 1
        if alone and user.opcode in _SLICES:
            total += shape_bytes(user.shape)
        elif alone and user.opcode == "bitcast":
            total += _used(users, user.name, full)
        elif not (alone and user.opcode == "dynamic-update-slice"):
            return full
    return total


def _written(module: Module, one: Instruction) -> int:
    return sum(size for _, size in result_bytes(module, one))


def result_bytes(module: Module, one: Instruction) -> list[tuple[str, int]]:
    """Shape of each result and the bytes written; of an update in place those of the update."""
    inside = {i.name: i for i in _fused(module, one)}
    if not inside:
        update = _update_bytes(module, one)
        parts = elements(one.shape)
        return [(one.shape, update)] if update else [(part, shape_bytes(part)) for part in parts]
    root = next(reversed(inside.values()))
    results = root.operand_names if root.opcode == "tuple" else (root.name,)
    written = []
    for name, shape in zip(results, elements(one.shape), strict=True):
        made = inside[name]
        while made.opcode == "bitcast":
            made = inside[made.operand_names[0]]
        written.append((shape, _update_bytes(module, made) or shape_bytes(made.shape)))
    return written


def _update_bytes(module: Module, one: Instruction) -> int:
    if one.opcode != "dynamic-update-slice":
        return 0
    return shape_bytes(module.operand_shapes(one)[1])
