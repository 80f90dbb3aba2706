"""Who makes and who reads each array of a compiled program, through loops, calls and fusions."""

import collections
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping

from colossax.aot.assignment import Value
from colossax.aot.hlo import Instruction, Module, elements

_BY_OWN_INDEX = frozenset(
    {"optimization-barrier", "async-update", "all-reduce-done", "copy", "add-dependency"}
)
_RESULT_SECOND = frozenset({"async-done", "all-gather-done", "collective-permute-done"})
_CALLS = frozenset({"fusion", "call", "conditional"})
_MOVES = frozenset(
    {
        "get-tuple-element",
        "tuple",
        "bitcast",
        "while",
        "parameter",
        "optimization-barrier",
        "async-start",
        "async-update",
        "async-done",
        "all-gather-done",
        "all-reduce-done",
        "collective-permute-done",
        "copy-done",
        *_CALLS,
    }
)
"""Operations that hand on an array as it is; of a call, what its last instruction makes."""

_IN_PLACE = frozenset({"dynamic-update-slice", "scatter"})


class Dataflow:
    """Edges between the arrays of a program.

    An array is an instruction and a place in its result's tuple. What a parameter of a
    computation reads is what the callers pass; in a loop's body, the loop's initial values and
    the body's own results, which connects all values of a carry.
    """

    def __init__(self, module: Module):
        self.module = module
        self._roots = {name: body[-1].name for name, body in module.computations.items() if body}
        self._homes = {i.name: home for home, body in module.computations.items() for i in body}
        self._callers: dict[str, list[tuple[Instruction, str, int]]] = collections.defaultdict(list)
        for caller in module.by_name.values():
            for position, (role, name) in enumerate(caller.called):
                self._callers[name].append((caller, role, position))
        self._sources: dict[Value, tuple[Value, ...]] = {}

    def instruction(self, value: Value) -> Instruction:
        """What makes a value.

        Raises:
            ValueError: The program has no such instruction.
        """
        if value[0] not in self.module.by_name:
            raise ValueError(f"HLO: no instruction is called '{value[0]}'")
        return self.module.by_name[value[0]]

    def callers(self, value: Value) -> tuple[tuple[Instruction, str], ...]:
        """(instruction, role) of those that run the computation in which a value is made."""
        return tuple((caller, role) for caller, role, _ in self._callers[self._homes[value[0]]])

    def shape(self, value: Value) -> str:
        """Shape of a value that is an array."""
        return _shape_at(self.instruction(value).shape, value[1])

    @functools.cached_property
    def values(self) -> tuple[Value, ...]:
        """Every array of the program."""
        return tuple(
            (i.name, index) for i in self.module.by_name.values() for index in _leaves(i.shape)
        )

    @functools.cached_property
    def readers(self) -> Mapping[Value, tuple[Value, ...]]:
        """Per array, those straight made from it."""
        by_source: dict[Value, list[Value]] = collections.defaultdict(list)
        for value in self.values:
            for source in self.sources(value):
                by_source[source].append(value)
        return {value: tuple(readers) for value, readers in by_source.items()}

    def sources(self, value: Value) -> tuple[Value, ...]:
        """Arrays from which a value is straight made, in the order of the operands."""
        if value not in self._sources:
            self._sources[value] = tuple(_element(*source) for source in self._find_sources(value))
        return self._sources[value]

    def _find_sources(self, value: Value) -> Iterable[Value]:
        made, index = self.instruction(value), value[1]
        operands = made.operand_names
        match made.opcode:
            case "constant" | "iota" | "partition-id" | "replica-id":
                return ()
            case "parameter":
                return self._passed(made, index)
            case "get-tuple-element":
                return [(operands[0], (_tuple_index(made), *index))]
            case "tuple":
                return [(operands[index[0]], index[1:])]
            case "while":
                return [(operands[0], index), (self._roots[dict(made.called)["body"]], index)]
            case "async-start" if index[:1] == (0,):
                return [(operands[index[1]], index[2:])]
            case "async-start":
                return [(self._roots[name], index[1:]) for _, name in made.called]
            case "all-gather-start" | "collective-permute-start" if index:
                return [(operands[index[1] if len(index) > 1 else 0], ())]
            case "all-reduce" | "all-reduce-start" | "all-gather" | "reduce-scatter" if index:
                return [(operands[index[0]], ())]
            case "copy-done":
                return [(operands[0], (0,))]
            case "copy-start":
                return [(operands[0], ())]
        if made.opcode in _BY_OWN_INDEX:
            return [(operands[0], index)]
        if made.opcode in _RESULT_SECOND:
            return [(operands[0], (1, *index))]
        if made.opcode in _CALLS:
            return [(self._roots[name], index) for _, name in made.called]
        values = [_element(name, ()) for name in operands]
        return [(v[0], (*v[1], *leaf)) for v in values for leaf in _leaves(self.shape(v))]

    def _passed(self, parameter: Instruction, index: tuple[int, ...]) -> Iterator[Value]:
        """What callers pass for a parameter of a computation."""
        for caller, role, position in self._callers[self._homes[parameter.name]]:
            if role in ("body", "condition"):
                yield caller.operand_names[0], index
                yield self._roots[dict(caller.called)["body"]], index
            elif caller.opcode == "conditional":
                yield caller.operand_names[position + 1], index
            elif role == "calls":
                yield caller.operand_names[int(parameter.operands)], index

    def spread(self, marks: Mapping[Value, frozenset[str]]) -> Mapping[Value, frozenset[str]]:
        """Per array the union of the marks of all arrays it is made from, its own included."""
        marked: dict[Value, frozenset[str]] = dict(marks)
        waiting = list(marks)
        while waiting:
            value = waiting.pop()
            for reader in self.readers.get(value, ()):
                old = marked.get(reader, frozenset())
                if reader not in marked or not marked[value] <= old:
                    marked[reader] = old | marked[value]
                    waiting.append(reader)
        return marked

    def back(
        self, starts: Iterable[Value], follow: Callable[[Value, Value], bool]
    ) -> tuple[Value, ...]:
        """`starts` and what they come from, along edges (value, source) that `follow` allows."""
        return _closure(starts, lambda v: (s for s in self.sources(v) if follow(v, s)))

    def is_move(self, value: Value) -> bool:
        """Whether a value is another one, handed on as it is."""
        return self.instruction(value).opcode in _MOVES and bool(self.sources(value))

    def kept(self, value: Value) -> tuple[Value, ...]:
        """Older arrays that a value is, wholly or but for an update in place."""
        if self.instruction(value).opcode in _IN_PLACE:
            return self.sources(value)[:1]
        return self.sources(value) if self.is_move(value) else ()

    def update(self, value: Value) -> Value | None:
        """What a `dynamic-update-slice` or `scatter` writes into an older array, or None."""
        opcode = self.instruction(value).opcode
        if opcode not in _IN_PLACE:
            return None
        return self.sources(value)[1 if opcode == "dynamic-update-slice" else -1]

    def same_array(self, value: Value) -> tuple[Value, ...]:
        """All values that a value is handed on from or to, updates in place included.

        Where another array begins, such as the zeros that several loops start from, its other
        uses are not followed: each is written elsewhere.
        """

        def near(at: Value) -> Iterator[Value]:
            yield from self.kept(at)
            if at == value or self.kept(at):
                yield from (r for r in self.readers.get(at, ()) if at in self.kept(r))

        return _closure([value], near)

    def writers(self, value: Value) -> tuple[Value, ...]:
        """Values that are computed, not handed on, among those that are the same array."""
        return tuple(v for v in self.same_array(value) if not self.is_move(v))

    def consumers(self, value: Value) -> Iterator[Value]:
        """What is computed from an array."""
        for at in self.same_array(value):
            yield from (r for r in self.readers.get(at, ()) if at not in self.kept(r))


def _element(operand: str, index: tuple[int, ...]) -> Value:
    """The array an operand names; newer versions write `name#1` for element 1 of a tuple."""
    name, *places = operand.split("#")
    return name, (*map(int, places), *index)


def _closure(
    starts: Iterable[Value], near: Callable[[Value], Iterable[Value]]
) -> tuple[Value, ...]:
    reached = dict.fromkeys(starts)
    waiting = list(reached)
    while waiting:
        for value in near(waiting.pop()):
            if value not in reached:
                reached[value] = None
                waiting.append(value)
    return tuple(reached)


@functools.lru_cache(maxsize=4096)
def _leaves(shape: str) -> tuple[tuple[int, ...], ...]:
    """Places of the arrays in a shape."""
    if not shape.startswith("("):
        return ((),)
    return tuple((i, *rest) for i, part in enumerate(elements(shape)) for rest in _leaves(part))


def _shape_at(shape: str, index: tuple[int, ...]) -> str:
    for place in index:
        shape = elements(shape)[place]
    return shape


def _tuple_index(made: Instruction) -> int:
    number = made.attributes.partition("index=")[2].partition(",")[0]
    if not number.strip().isdigit():
        raise ValueError(f"HLO line {made.line}: an element of a tuple without its index")
    return int(number)
