"""The text of a compiled program as computations and instructions."""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Mapping

ITEM_BITS = {
    "pred": 8,
    **{f"{kind}{bits}": bits for kind in "su" for bits in (1, 2, 4, 8, 16, 32, 64)},
    "f16": 16,
    "bf16": 16,
    "f32": 32,
    "f64": 64,
    "c64": 64,
    "c128": 128,
    "f4e2m1fn": 4,
    "f8e3m4": 8,
    "f8e4m3": 8,
    "f8e4m3b11fnuz": 8,
    "f8e4m3fn": 8,
    "f8e4m3fnuz": 8,
    "f8e5m2": 8,
    "f8e5m2fnuz": 8,
    "f8e8m0fnu": 8,
    "token": 0,
    "opaque": 0,
}

HOST_SPACE = "S(5)"
"""Host memory in the layout of a shape."""

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$")
_NAMED = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([\d,<=]*)\]")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_CALLED_LISTS = {
    "branch_computations": "branch",
    "called_computations": "calls",
    "calls": "calls",
}
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: Without the percent sign.
        shape: Text of its result's shape, `f32[8,4]{1,0}` or a tuple in parentheses.
        opcode: `all-gather-start`, `fusion`, ...
        operands: Text between the parentheses behind the opcode.
        attributes: Text behind those.
        line: Number in the text, from 1.
    """

    name: str
    shape: str
    opcode: str
    operands: str
    attributes: str
    line: int

    @property
    def operand_names(self) -> tuple[str, ...]:
        """What it reads: names of instructions, `name#1` for a part of a tuple (JAX 0.12)."""
        return tuple(word.split()[-1].lstrip("%") for word in split_top(self.operands))

    @property
    def op_name(self) -> str:
        """Path of the operation in the traced program, or empty."""
        match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return match.group(1) if match else ""

    @property
    def called(self) -> tuple[tuple[str, str], ...]:
        """(role, computation) of what it runs: `body`, `condition`, `calls`, `branch`, ..."""
        attributes = _QUOTED.sub('""', self.attributes)
        named = [(m.group(1), m.group(2)) for m in _CALLED.finditer(attributes)]
        for key, role in _CALLED_LISTS.items():
            listed = re.search(rf"\b{key}=\{{([^}}]*)\}}", attributes)
            names = split_top(listed.group(1)) if listed else []
            named += [(role, name.lstrip("%")) for name in names]
        return tuple(named)

    @property
    def trip_count(self) -> int | None:
        """Times a while loop runs, where the compiler knows."""
        match = _TRIPS.search(self.attributes)
        return int(match.group(1)) if match else None

    @property
    def in_host_memory(self) -> bool:
        """Whether any part of the result lives in host memory."""
        return HOST_SPACE in self.shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Module:
    """A compiled program.

    Attributes:
        entry: Name of the computation that runs.
        computations: Instructions of each, in the order of the schedule.
        frames: Source positions, `file.py:line`, by stack frame number.
    """

    entry: str
    computations: Mapping[str, tuple[Instruction, ...]]
    frames: Mapping[int, str]

    def with_trip_count(self, trips: int) -> "Module":
        """The program, with this many turns of its outermost loops of an unknown number.

        Of loops within computations that the program calls nothing is said.
        """
        known = f', backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'

        def counted(one: Instruction) -> Instruction:
            if one.opcode != "while" or one.trip_count is not None:
                return one
            return dataclasses.replace(one, attributes=one.attributes + known)

        body = tuple(counted(one) for one in self.computations[self.entry])
        return dataclasses.replace(self, computations={**self.computations, self.entry: body})

    def assuming(self, scope: str, trips: int) -> tuple["Module", int]:
        """The program, with this many turns of each loop of an unknown number, and how many.

        Args:
            scope: Innermost scope in which such loops were traced; others stay.
            trips: Turns.
        """
        known = f', backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'
        named, found = f'/{scope}/while"', 0

        def counted(one: Instruction) -> Instruction:
            nonlocal found
            if one.opcode != "while" or one.trip_count is not None or named not in one.attributes:
                return one
            found += 1
            return dataclasses.replace(one, attributes=one.attributes + known)

        computations = {name: tuple(map(counted, body)) for name, body in self.computations.items()}
        return dataclasses.replace(self, computations=computations), found

    def source(self, instruction: Instruction) -> str:
        """`file.py:line` of the operation, or empty."""
        written = re.search(r'source_file="([^"]*)"(?: source_line=(\d+))?', instruction.attributes)
        if written:
            return f"{written.group(1)}:{written.group(2) or 0}"
        frame = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
        return self.frames.get(int(frame.group(1)), "") if frame else ""

    def operand_shapes(self, instruction: Instruction) -> list[str]:
        """Shapes of what an instruction reads."""
        shapes = []
        for operand in instruction.operand_names:
            name, *places = operand.split("#")
            shape = self.by_name[name].shape
            for place in places:
                shape = elements(shape)[int(place)]
            shapes.append(shape)
        return shapes

    @functools.cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        """Every instruction.

        Raises:
            ValueError: Two have the same name, which a compiled program never has.
        """
        named: dict[str, Instruction] = {}
        for one in itertools.chain(*self.computations.values()):
            if named.setdefault(one.name, one) is not one:
                first = named[one.name].line
                raise ValueError(f"HLO lines {first} and {one.line}: both name '{one.name}'")
        return named


def parse_module(text: str) -> Module:
    """Read what `compiled.as_text()` or a dump of the compiler says.

    Raises:
        ValueError: A line within a computation is no instruction; the text has no entry.
    """
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry, current, body = "", "", []
    for number, line in enumerate(text.splitlines(), 1):
        if current:
            if line.startswith("}"):
                computations[current] = tuple(body)
                current, body = "", []
            elif line.strip():
                body.append(_instruction(line, number))
        elif (header := _HEADER.match(line)) is not None:
            current = header.group(2)
            entry = current if header.group(1) else entry
    if not entry:
        raise ValueError("HLO: the text has no ENTRY computation")
    return Module(entry=entry, computations=computations, frames=_frames(text))


def _instruction(line: str, number: int) -> Instruction:
    named = _NAMED.match(line)
    if named is None:
        raise ValueError(f"HLO line {number}: no instruction: {line[:120]!r}")
    rest = line[named.end() :]
    end = matching(rest, 0) + 1 if rest.startswith("(") else (rest + " ").index(" ")
    opcode, opened, _ = rest[end:].lstrip().partition("(")
    if not opened or not re.fullmatch(r"[a-z][\w\-]*", opcode):
        raise ValueError(f"HLO line {number}: no operation: {line[:120]!r}")
    start = rest.index("(", end)
    close = matching(rest, start)
    return Instruction(
        name=named.group(2),
        shape=re.sub(r"/\*.*?\*/", "", rest[:end]),
        opcode=opcode,
        operands=re.sub(r"/\*.*?\*/", "", rest[start + 1 : close]),
        attributes=rest[close + 1 :],
        line=number,
    )


def matching(text: str, start: int) -> int:
    """Position of the bracket that closes the one at `start`; quoted text is passed over.

    Raises:
        ValueError: Nothing closes it.
    """
    depth, quoted = 0, False
    for match in re.finditer(r'\\.|["(){}\[\]]', text[start:]):
        mark = match.group()
        if mark == '"':
            quoted = not quoted
        elif not quoted and mark in "({[":
            depth += 1
        elif not quoted and mark in ")}]":
            depth -= 1
            if depth == 0:
                return start + match.start()
    raise ValueError(f"HLO: nothing closes the bracket in {text[start : start + 120]!r}")


def split_top(text: str) -> list[str]:
    """Parts between commas that lie in no bracket."""
    parts, depth, start = [], 0, 0
    for match in re.finditer(r"[(){}\[\],]", text):
        mark = match.group()
        if mark == "," and depth == 0:
            parts.append(text[start : match.start()])
            start = match.end()
        elif mark in "({[":
            depth += 1
        elif mark in ")}]":
            depth -= 1
    return [part.strip() for part in (*parts, text[start:]) if part.strip()]


def elements(shape: str) -> list[str]:
    """The parts of a tuple's shape; an array's is its only part."""
    return split_top(shape[1:-1]) if shape.startswith("(") else [shape]


def shape_bytes(shape: str) -> int:
    """Bytes of an array, or of all arrays of a tuple.

    Raises:
        ValueError: An element type or a form that is not known.
    """
    bare = re.sub(r"/\*.*?\*/|\{[^}]*\}", "", shape)
    if not re.fullmatch(r"[(),\s]*", _ARRAY.sub("", bare)):
        raise ValueError(f"HLO: a shape in an unknown form: {shape[:120]!r}")
    total = 0
    for dtype, dims in _ARRAY.findall(bare):
        if dtype not in ITEM_BITS:
            raise ValueError(f"HLO: the size of '{dtype}' in {shape!r} is not known")
        count = math.prod(int(d.replace("<=", "")) for d in dims.split(",") if d)
        total += (count * ITEM_BITS[dtype] + 7) // 8
    return total


def runs_on_host(instruction: Instruction) -> bool:
    """Whether an instruction is annotated as host computation or calls one."""
    return bool(
        re.search(
            r'custom_call_target="HostExecute"|_xla_compute_type="?host"?', instruction.attributes
        )
    )


def _frames(text: str) -> dict[int, str]:
    """Stack frame number to `file.py:line`, from the tables above the computations."""
    names = {
        int(n): file for n, file in re.findall(r'^(\d+) "([^"]*)"', _table(text, "FileNames"), re.M)
    }
    places = {
        int(n): f"{names.get(int(file), '')}:{line}"
        for n, file, line in re.findall(
            r"^(\d+) \{file_name_id=(\d+).*?\bline=(\d+)", _table(text, "FileLocations"), re.M
        )
    }
    frames = re.findall(r"^(\d+) \{file_location_id=(\d+)", _table(text, "StackFrames"), re.M)
    return {int(n): places.get(int(place), "") for n, place in frames}


def _table(text: str, name: str) -> str:
    match = re.search(rf"^{name}\n(.*?)\n\n", text, re.M | re.S)
    return match.group(1) if match else ""
