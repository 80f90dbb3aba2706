"""What each array of a training step is for, by where it comes from and who reads it."""

import functools
import math
import re
from collections.abc import Callable, Mapping

from colossax.aot.assignment import Value
from colossax.aot.dataflow import Dataflow
from colossax.aot.hlo import Instruction, parse_module
from colossax.aot.saved import Stack, compiled_stacks, name_of

PARAMETERS, OPTIMIZER, INPUT, STATE = "parameters", "optimizer", "input", "state"
GRADIENTS, UNREDUCED = "gradients", "unreduced gradients"
SAVED = "saved:"
WEIGHT_COPIES, NEW_STATE, WORKING_SET = "weight copies", "new state", "working set"

_LAYOUT = frozenset({"bitcast-convert", "convert", "copy", "copy-start", "reshape", "transpose"})
_REDUCES = frozenset({"all-to-all", "reduce-scatter"})
_PICKS = frozenset({"all-gather", "all-gather-start", "dynamic-slice", "pad", "slice", *_REDUCES})
_CONTRACTS = frozenset({"convolution", "custom-call", "dot", "gather", "reduce", "reduce-window"})


def argument_term(path: str) -> str:
    """Term of an argument of a training step `(state, batch)`.

    `state['params']...` are parameters, `state['opt_state']...` optimizer, `batch...` input, all
    else state. The state may come in several arguments, as `state_read` and `state_given_up`.
    """
    kind = re.match(r"state\w*\['(params|opt_state)'\]", path)
    if kind is not None:
        return PARAMETERS if kind.group(1) == "params" else OPTIMIZER
    return INPUT if path.startswith("batch") else STATE


class Terms:
    """The term of each temporary of a program, and of each argument.

    Nothing is told by size or place; what counts is who makes an array and who reads it:

    * gradients: the results of the program, followed back item by item, are arguments that are
      parameters or optimizer state, what these were combined with, and the new state made of
      both; of the three the second. What lies before a reduce-scatter, or before each device
      picks its part, is unreduced.
    * weight copies: made of parameters alone.
    * saved: read by an operation of the backward pass (`transpose(` or `rematted_computation` in
      its path) and written by none.

    Attributes:
        flow: Edges of the program.
        arguments: Term per argument.
    """

    def __init__(
        self,
        hlo: str,
        *,
        term_of: Callable[[str], str] = argument_term,
        names: Mapping[Stack, str] | None = None,
    ):
        self.flow = Dataflow(parse_module(hlo))
        self._stacks = compiled_stacks(hlo)
        self._names = names or {}
        module = self.flow.module
        inputs = [i for i in module.computations[module.entry] if i.opcode == "parameter"]
        self.arguments = {int(i.operands): term_of(plain(i.op_name)) for i in inputs}
        self._inputs: dict[Value, str] = {
            (i.name, ()): self.arguments[int(i.operands)] for i in inputs
        }
        self._phases: dict[Value, str] = {}

    def term(self, value: Value) -> str:
        """Term of a temporary."""
        if self.flow.shape(value).startswith("("):
            return WORKING_SET
        if value in self._gradients:
            return UNREDUCED if self._gradients[value] else GRADIENTS
        if value in self._new_state:
            return NEW_STATE
        marks = self._marks.get(value, frozenset())
        if marks == {PARAMETERS}:
            return WEIGHT_COPIES
        if marks and self._is_saved(value):
            return SAVED + self._saved_name(value)
        return WORKING_SET

    def maker(self, value: Value) -> Instruction:
        """The operation that best tells what an array holds: of a stack, what is written to it."""
        if self.flow.shape(value).startswith("("):
            return self.flow.instruction(value)
        written = self.flow.writers(value)
        updates = [u for v in written if (u := self.flow.update(v)) is not None]
        ends = [self._unmoved(v)[-1] for v in (*updates, *written)]
        if ends and self._is_carry(ends[0]):
            ends = [*self.flow.writers(ends[0]), *ends]
        named = (maker for end in ends if (maker := self._first_named(end)) is not None)
        return next(named, self.flow.instruction(value))

    def stack(self, made: Instruction) -> Stack:
        """Source positions of an operation, innermost first; or empty."""
        frame = re.search(r"stack_frame_id=(\d+)", made.attributes)
        if frame is not None:
            return self._stacks.get(int(frame.group(1)), ())
        source = self.flow.module.source(made)
        return (source,) if source else ()

    def _first_named(self, value: Value) -> Instruction | None:
        """What makes a value, or else the nearest that it is made from, and has a path."""
        reached = self.flow.back([value], lambda v, _: not self.flow.instruction(v).op_name)
        makers = map(self.flow.instruction, reached)
        return next((made for made in makers if made.op_name), None)

    @functools.cached_property
    def _marks(self) -> Mapping[Value, frozenset[str]]:
        """Terms of the arguments that each array depends on."""
        return self.flow.spread({v: frozenset({t}) for v, t in self._inputs.items()})

    def _is_saved(self, value: Value) -> bool:
        """Whether the forward pass writes an array and the backward pass reads it."""
        if any(self._phase(v) == "backward" for v in self.flow.writers(value)):
            return False
        return any(self._phase(v) == "backward" for v in self.flow.consumers(value))

    def _phase(self, value: Value) -> str:
        """`forward` or `backward` of what is differentiated, or empty; recomputation is backward.

        The compiler's own copies count as what they copy, its other operations as the loop they
        are in.
        """
        if value not in self._phases:
            self._phases[value] = ""  # for a cycle of copies
            self._phases[value] = self._find_phase(value)
        return self._phases[value]

    def _find_phase(self, value: Value) -> str:
        made = self.flow.instruction(value)
        if made.op_name:
            if "transpose(" in made.op_name or "rematted_computation" in made.op_name:
                return "backward"
            return "forward" if "jvp(" in made.op_name else ""
        if made.opcode in _LAYOUT:
            return self._phase(self._unmoved(value)[-1])
        around = [self._phase((caller.name, ())) for caller, _ in self.flow.callers(value)]
        return max(around, key=("", "forward", "backward").index, default="")

    def _unmoved(self, value: Value) -> list[Value]:
        """A value and what it was before moves and changes of layout, to where it is computed or
        a turn of a loop gets it from the turn before."""
        path = [value]
        while (source := self._moved_from(path[-1])) is not None:
            path.append(source)
        return path

    def _moved_from(self, value: Value) -> Value | None:
        moved = self.flow.is_move(value) or self.flow.instruction(value).opcode in _LAYOUT
        return self.flow.sources(value)[0] if moved and not self._is_carry(value) else None

    def _is_carry(self, value: Value) -> bool:
        if self.flow.instruction(value).opcode != "parameter":
            return False
        return any(role == "body" for _, role in self.flow.callers(value))

    def _saved_name(self, value: Value) -> str:
        paths = self._writing(value)
        # A stack that a loop has filled may be laid out anew once the loop has ended.
        loops = [v for path in paths for v in path if self.flow.instruction(v).opcode == "while"]
        inside = [path for loop in loops for path in self._writing(loop)]
        made = [self.flow.instruction(v) for path in (*paths, *inside) for v in path]
        name = name_of(map(self.stack, made), self._names, self._files)
        if name:
            return name
        return "input" if any(self._is_carry(path[-1]) for path in paths) else "other"

    def _writing(self, value: Value) -> list[list[Value]]:
        """Of all that is written into an array, what it was before moves and changes of layout."""
        written = [v for v in self.flow.writers(value) if self.flow.sources(v)]
        return [self._unmoved(self.flow.update(v) or v) for v in written]

    @functools.cached_property
    def _files(self) -> frozenset[str]:
        places = (place for stack in self._stacks.values() for place in stack)
        return frozenset(place.rpartition(":")[0] for place in places)

    @functools.cached_property
    def _gradients(self) -> Mapping[Value, bool]:
        """Gradients, and whether they are unreduced."""
        late: dict[Value, bool] = {}
        waiting = [(v, False) for v in self._outputs]
        while waiting:
            value, unreduced = waiting.pop()
            if value not in late or (late[value] and not unreduced):
                late[value] = unreduced
                after = unreduced or self._reduces(value)
                within = value in self._new_state
                sources = self.flow.sources(value)
                waiting += [(s, after) for s in sources if self._is_part(s, value, within=within)]
        return {v: unreduced for v, unreduced in late.items() if v not in self._new_state}

    @functools.cached_property
    def _outputs(self) -> tuple[Value, ...]:
        """The program's results but for scalars."""
        root = self.flow.module.computations[self.flow.module.entry][-1].name
        return tuple(v for v in self.flow.values if v[0] == root and self._count(v) > 1)

    @functools.cached_property
    def _new_state(self) -> frozenset[Value]:
        """Old parameters and optimizer state, and what the update makes of them."""
        reached = frozenset(self.flow.back(self._outputs, self._is_updated_by))
        old = [v for v in reached if self._inputs.get(v) in (PARAMETERS, OPTIMIZER)]
        new = set(old)
        while old:
            value = old.pop()
            for reader in self.flow.readers.get(value, ()):
                if reader in reached and reader not in new and self._is_updated_by(reader, value):
                    new.add(reader)
                    old.append(reader)
        return frozenset(new)

    def _is_updated_by(self, value: Value, source: Value) -> bool:
        """Whether a value is its source in part, and not computed in what is differentiated."""
        computed = not self.flow.is_move(value) and self._phase(value) != ""
        return not computed and self._is_part(source, value, within=True)

    def _is_part(self, source: Value, value: Value, *, within: bool) -> bool:
        """Whether a value is its source item by item, or parts of it, or combined with others.

        Args:
            source: One of the value's sources.
            value: An array.
            within: Whether that holds as well for what a stack is updated with.
        """
        opcode = self.flow.instruction(value).opcode
        if opcode in _CONTRACTS:
            return False
        if self.flow.is_move(value):
            return True
        if opcode in _PICKS:
            return source == self.flow.sources(value)[0]
        update = self.flow.update(value)
        if update is not None:
            return source in self.flow.kept(value) or (within and source == update)
        return self._count(source) == self._count(value)

    def _reduces(self, value: Value) -> bool:
        """Whether a value is summed over devices, or is a device's part of its source."""
        opcode = self.flow.instruction(value).opcode
        if opcode in ("dynamic-slice", "slice"):
            return any(v in self._by_device for v in self.flow.sources(value)[1:])
        return opcode in _REDUCES

    @functools.cached_property
    def _by_device(self) -> Mapping[Value, frozenset[str]]:
        """Arrays that depend on the number of the device."""
        made = self.flow.module.by_name.values()
        numbers = [i for i in made if i.opcode in ("partition-id", "replica-id")]
        return self.flow.spread({(i.name, ()): frozenset({"device"}) for i in numbers})

    def _count(self, value: Value) -> int:
        dims = re.search(r"\[([\d,<=]*)\]", self.flow.shape(value))
        return math.prod(int(d.strip("<=")) for d in dims.group(1).split(",") if d) if dims else 0


def plain(text: str) -> str:
    """Text without the backslashes of a quotation."""
    return re.sub(r"\\(.)", r"\1", text)
