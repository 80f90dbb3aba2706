"""The microbatches of a batch on their way through programs of stages, as a table says."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from colossax.layerwise import added
from colossax.pipeline import Kind, Op, Table
from colossax.sharding import use
from colossax.step.gradients.sums import together
from colossax.step.programs.ahead import short
from colossax.step.programs.chunks import Chunk, Given
from colossax.step.programs.numbered import Leaves, Numbered
from colossax.step.programs.processes import Way, program, way
from colossax.step.programs.sending import sent
from colossax.step.programs.waiting import BACK, Waiting, waits_on_host


@dataclasses.dataclass(kw_only=True)
class Underway:
    """What has been dispatched of a batch.

    Attributes:
        params: Of each chunk, parameters that it reads and that learn.
        given: Of each chunk.
        grads: Of each chunk, added up so far.
        found: What the last chunk has given so far.
        inputs: By position and microbatch, what waits for its forward pass.
        sums: By microbatch, what layers counted, where the last chunk is.
        kept: What forward keeps for backward; None where there is none.
        back: By position and microbatch, gradients of output and sums that wait for backward.
        pending: Likewise, what weight gradients need: of what is kept, of input gradients.
        leaving: What goes to other processes when the tick ends.
    """

    params: Sequence[Leaves]
    given: Sequence[Given]
    grads: list[Leaves]
    found: Any
    kept: Any = None
    inputs: dict[tuple[int, int], Any] = dataclasses.field(default_factory=dict)
    sums: dict[int, list[Any]] = dataclasses.field(default_factory=dict)
    back: dict[tuple[int, int], Any] = dataclasses.field(default_factory=dict)
    pending: dict[tuple[int, int], Any] = dataclasses.field(default_factory=dict)
    leaving: list[Callable[[], None]] = dataclasses.field(default_factory=list)

    def leave(self) -> None:
        """Send what waits for the end of a tick, in the order in which it was found."""
        for send in self.leaving:
            send()
        self.leaving.clear()


class Forward:
    """Forward passes alone: what the loss gives, added up over the microbatches."""

    def __init__(self, chunks: Sequence[Chunk], **options: Any):
        """Compile nothing yet.

        Args:
            chunks: Of the loss.
            **options: Of `jax.jit`.
        """
        self.chunks = chunks
        self.last = len(chunks) - 1
        self._forward = [program(chunk.bound, _applied(chunk), **options) for chunk in chunks]
        self._added = program(chunks[-1].bound, added, **options)

    def start(self, table: Table, params: Sequence[Leaves], given: Sequence[Given]) -> Underway:
        """Nothing has been done."""
        return Underway(params=params, given=given, grads=[], found=None)

    def run(self, table: Table, params: Sequence[Leaves], given: Sequence[Given]) -> Underway:
        """All of a table; what is dispatched waits for its inputs, and this for nothing.

        Args:
            table: Of the chunks' positions.
            params: See `Underway`.
            given: Likewise.
        """
        underway, now = self.start(table, params, given), 0
        for tick, stage, op in table.operations():
            if tick != now:
                underway.leave()
                now = tick
            self._do(op, table.position(stage, op.chunk), underway)
        underway.leave()
        return underway

    def _do(self, op: Op, position: int, at: Underway) -> None:
        if op.kind is Kind.FORWARD:
            self.forward(position, op.microbatch, at)

    def forward(self, position: int, microbatch: int, at: Underway) -> None:
        """The forward pass of a chunk."""
        start = self._start(position, microbatch, at)
        given = at.given[position]
        found = self._forward[position](at.params[position], start, given, jnp.int32(microbatch))
        self._send(position, microbatch, at, *found)

    def _start(self, position: int, microbatch: int, at: Underway) -> Any:
        start = at.inputs.pop((position, microbatch)) if position else ()
        return (start, at.sums.pop(microbatch)) if position == self.last else start

    def _send(self, position: int, microbatch: int, at: Underway, out: Any, sums: Any) -> None:
        """A chunk's output to the next one, what its layers counted to the last one."""
        if position == self.last:
            found = (out, sums)
            at.found = found if at.found is None else self._added(at.found, found)
            return

        def on() -> None:
            at.inputs[position + 1, microbatch] = self._moved(out, position, position + 1)
            there = self._moved(sums, position, self.last, whole=True)
            at.sums.setdefault(microbatch, []).extend(there)

        self._when(position, (position + 1, self.last), at, on)

    def _when(self, position: int, to: Sequence[int], at: Underway, send: Callable) -> None:
        """Send at once within a process; to another one when the tick ends.

        What a process dispatches after a program that waits for another process waits with it, so
        such programs stand between ticks, when both sides have done the same of the table.
        """
        here = self.chunks[position].bound.mesh
        if any(way(here, self.chunks[there].bound.mesh) is Way.ACROSS for there in to):
            at.leaving.append(send)
        else:
            send()

    def _moved(self, tree: Any, position: int, to: int, *, whole: bool = False) -> Any:
        """From chunk to chunk: what goes from layer to layer as it lies, or what is small."""
        here, there = self.chunks[position].bound, self.chunks[to].bound
        specs = None if whole else self.chunks[position].weights.specs
        return sent(tree, here, there, specs, passed=True)


class BothWays(Forward):
    """Forward and backward passes."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        numbered: Numbered,
        given: Given,
        apart: bool,
        **options: Any,
    ):
        """Trace each chunk; compile nothing yet.

        Args:
            chunks: Of the loss.
            numbered: All parameters.
            given: Shapes of what chunks get, parameters left out.
            apart: Whether input and weight gradients are programs of their own.
            **options: Of `jax.jit`.
        """
        super().__init__(chunks, **options)
        self._parts = [_Part(chunk, numbered, given, apart) for chunk in chunks]
        self._on_host = [waits_on_host(chunk, numbered) for chunk in chunks]

        def jit(part: _Part, name: str, **more: Any) -> Callable:
            return program(part.chunk.bound, getattr(part, name), **more, **options)

        self._forward = [jit(part, "forward") for part in self._parts]
        self._backward = [jit(part, "backward", donate_argnums=1) for part in self._parts]
        self._input = [jit(part, "input_gradient") for part in self._parts]
        self._weight = [jit(part, "weight_gradient", donate_argnums=1) for part in self._parts]
        self._zeros = [
            jit(part, "zeros", out_shardings=part.shardings) if part.shardings else dict
            for part in self._parts
        ]

    def start(self, table: Table, params: Sequence[Leaves], given: Sequence[Given]) -> Underway:
        """Nothing has been done."""
        zeros: list[Leaves] = [make() for make in self._zeros]
        kept = Waiting(table, self._on_host)
        return Underway(params=params, given=given, grads=zeros, found=None, kept=kept)

    def _do(self, op: Op, position: int, at: Underway) -> None:
        if op.kind is Kind.FORWARD:
            self.forward(position, op.microbatch, at)
        elif op.kind in BACK:
            self.backward(position, op.microbatch, at, apart=op.kind is Kind.INPUT)
        else:
            pending = at.pending.pop((position, op.microbatch))
            given, number = at.given[position], jnp.int32(op.microbatch)
            at.grads[position] = self._weight[position](
                at.params[position], at.grads[position], given, number, *pending
            )

    def forward(self, position: int, microbatch: int, at: Underway) -> None:
        """The forward pass of a chunk, what backward needs kept."""
        start = self._start(position, microbatch, at)
        given = at.given[position]
        found = self._forward[position](at.params[position], start, given, jnp.int32(microbatch))
        (out, sums), kept = found
        at.kept.put(position, microbatch, kept)
        self._send(position, microbatch, at, out, sums)

    def backward(self, position: int, microbatch: int, at: Underway, *, apart: bool) -> None:
        """Gradients of a chunk's input, and unless they come apart of its parameters."""
        kept = at.kept.take(position, microbatch)
        by = at.back.pop((position, microbatch)) if position < self.last else None
        args = (at.given[position], jnp.int32(microbatch), kept, by)
        if apart:
            before, pending = self._input[position](at.params[position], *args)
            again = kept if self._parts[position].reads_kept else ()
            at.pending[position, microbatch] = (again, pending)
        else:
            before, at.grads[position] = self._backward[position](
                at.params[position], at.grads[position], *args
            )
        if position == self.last:
            before, sums = before
            for number, chunk in enumerate(self.chunks[: self.last]):
                count = len(chunk.output[1])
                self._back_with(number, microbatch, at, sums[:count])
                sums = sums[count:]
        if position:
            self._back(position, microbatch, at, before)

    def _back_with(self, number: int, microbatch: int, at: Underway, sums: Any) -> None:
        """From the last chunk to another, gradients of what its layers counted."""

        def back() -> None:
            there = self._moved(sums, self.last, number, whole=True)
            at.back[number, microbatch] = (None, there)

        self._when(self.last, (number,), at, back)

    def _back(self, position: int, microbatch: int, at: Underway, before: Any) -> None:
        """From a chunk to the one before, the gradient of its input."""

        def back() -> None:
            _, sums = at.back[position - 1, microbatch]
            there = self._moved(before, position, position - 1)
            at.back[position - 1, microbatch] = (there, sums)

        self._when(position, (position - 1,), at, back)


def _applied(chunk: Chunk) -> Callable:
    """A chunk's forward pass, of which nothing is kept."""

    def forward(*args: Any) -> Any:
        with use(chunk.bound):
            out, sums = chunk.apply(*args)
            return chunk.weights.laid_out(out), sums

    return forward


class _Part:
    """What is traced of one chunk."""

    def __init__(self, chunk: Chunk, numbered: Numbered, given: Given, apart: bool):
        self.chunk, self.weights = chunk, chunk.weights
        self._infos = {at: numbered.infos[at] for at in chunk.learning}
        self._shapes = numbered.shapes_of(chunk.learning)
        self.layer = chunk.layer(numbered, given)
        with use(chunk.bound):
            self._apart = self.layer.apart(loops=True) if apart else None

    @property
    def reads_kept(self) -> bool:
        """Whether weight gradients need what forward kept, and not the input gradient's alone."""
        return self._apart is not None and self._apart.reads_kept

    @property
    def shardings(self) -> dict[int, Any]:
        """Of gradients of its parameters; of a program without arguments nothing else says it."""
        specs = {at: self.weights.gradient_spec(info) for at, info in self._infos.items()}
        # As the backward pass gives them, or it would be compiled for these besides.
        mesh = self.chunk.bound.mesh
        return {at: NamedSharding(mesh, short(spec)) for at, spec in specs.items()}

    def zeros(self) -> Leaves:
        """Gradients of nothing."""
        zeros = {at: jnp.zeros(x.shape, x.dtype) for at, x in self._shapes.items()}
        return self.weights.accumulable(self._infos, self.weights.spread(self._infos, zeros))

    def forward(self, params: Leaves, start: Any, given: Given, number: Any) -> Any:
        """`((output, sums), kept)`."""
        with use(self.chunk.bound):
            params = self._own(params)
            (out, sums), kept = self.layer.forward(params, start, given, number)
            return (self.weights.laid_out(out), sums), kept

    def backward(
        self, params: Leaves, grads: Leaves, given: Given, number: Any, kept: Any, by: Any
    ) -> tuple[Any, Leaves]:
        """Gradient of the input, and gradients with those of the parameters added."""
        with use(self.chunk.bound):
            params = self._own(params)
            found = self.layer.transpose(params, given, number, kept, self._by(by))
            return self.weights.laid_out(found.carry), self._added(grads, found.params)

    def input_gradient(self, params: Leaves, given: Given, number: Any, kept: Any, by: Any) -> Any:
        """Gradient of the input, and what those of the parameters need."""
        assert self._apart is not None
        with use(self.chunk.bound):
            params = self._own(params)
            carry, _, pending = self._apart.input_gradient(
                params, given, number, kept, self._by(by)
            )
            return self.weights.laid_out(carry), pending

    def weight_gradient(
        self, params: Leaves, grads: Leaves, given: Given, number: Any, kept: Any, pending: Any
    ) -> Leaves:
        """Gradients with those of the parameters added."""
        assert self._apart is not None
        with use(self.chunk.bound):
            params = self._own(params)
            more = self._apart.weight_gradient(params, given, number, kept, pending)
            return self._added(grads, more)

    def _own(self, params: Leaves) -> Leaves:
        """Those of each device, with what stands for others in host memory."""
        away = {at: x for at, x in self._shapes.items() if at not in params}
        stand_ins = {at: jnp.zeros(x.shape, x.dtype) for at, x in away.items()}
        return self.weights.spread(self._infos, {**params, **stand_ins})

    def _by(self, by: Any) -> Any:
        """Gradient by output and sums; of the loss itself 1, by what it gave beside it 0."""
        if by is not None:
            return by
        value, others = self.chunk.output
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), others)
        return jnp.ones(value.shape, value.dtype), zeros

    def _added(self, grads: Leaves, more: Leaves) -> Leaves:
        more = self.weights.accumulable(self._infos, more)
        return together(self._infos, grads, more)
