"""Matmuls that a compiled program runs on a device, counted in its text."""

import math
import re

from colossax.aot.hlo import elements, parse_module

_DIMS = re.compile(r"\[([\d,]*)\]")


def executed_flops(hlo):
    """FLOPs of one device's matmuls, those in loops as often as they run."""
    module = parse_module(hlo)
    known = {}

    def of(computation):
        if computation not in known:
            known[computation] = sum(map(one, module.computations[computation]))
        return known[computation]

    def one(instruction):
        if instruction.opcode == "dot" or "$gemm" in instruction.attributes:
            return _of_matmul(module, instruction)
        if instruction.opcode == "while":
            assert instruction.trip_count is not None, instruction.name
            return instruction.trip_count * of(dict(instruction.called)["body"])
        called = [name for role, name in instruction.called if role != "to_apply"]
        if instruction.opcode == "conditional":
            return max(map(of, called))
        return sum(map(of, called))

    return of(module.entry)


def _of_matmul(module, instruction):
    left = _dims(module.operand_shapes(instruction)[0])
    found = re.search(
        r'lhs_contracting_dim(?:s|ensions)"?[=:][\[{]([\d",]*)', instruction.attributes
    )
    assert found, instruction.attributes
    contracted = [left[int(at)] for at in found.group(1).replace('"', "").split(",") if at]
    shape = instruction.shape
    out = elements(shape)[0] if shape.startswith("(") else shape
    return 2 * math.prod(_dims(out)) * math.prod(contracted)


def _dims(shape):
    found = _DIMS.search(shape)
    assert found, shape
    return [int(size) for size in found.group(1).split(",") if size]
