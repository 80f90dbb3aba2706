"""A loss cut into the chunks of stages that have programs of their own."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from colossax.config import BoundPlan
from colossax.errors import PlanError
from colossax.layerwise import CutLoss, CutRun, Layer, Scanned, cut_loss, shapes_of
from colossax.sharding import RowOrder, in_order, use
from colossax.sharding.rules import chunks_of
from colossax.step.programs.numbered import Leaves, Numbered
from colossax.step.stages.travel import stream_spec

Loss = Callable[..., Any]
"""`(parameters, microbatch, key, term weights, variables) -> (one number, others)`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Given:
    """What a stage's programs get beside parameters that learn; nothing of it is differentiated.

    Attributes:
        fixed: Parameters that do not learn.
        arrays: Of the batch, `[microbatches, rows, ...]`.
        keys: `[microbatches]`; None: none.
        weights: See `Microbatches.term_weights`.
        variables: See `TrainState`.
    """

    fixed: dict[int, Any]
    arrays: Any
    keys: Any
    weights: Any
    variables: Any

    def having(self, fixed: dict[int, Any]) -> "Given":
        """The same with these parameters."""
        return dataclasses.replace(self, fixed=fixed)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Chunk:
    """Layers of a stage that follow one another, with what stands before or behind them.

    Attributes:
        position: Its place in the model.
        stage: Who has it.
        bound: The plan on that stage's devices.
        learning: Numbers of the parameters that it reads and that learn.
        fixed: Of those that do not.
        apply: `(learning, input, given, microbatch) -> (output, sums)`. The input of the first is
            (), of the last (carry, sums of all before); the output of the last one number, its
            sums what the loss gave beside it.
        input: Shapes of its input.
        output: Of its output and sums.
    """

    position: int
    stage: int
    bound: BoundPlan
    learning: tuple[int, ...]
    fixed: tuple[int, ...]
    apply: Callable[[Leaves, Any, Given, Array], tuple[Any, Any]]
    input: Any
    output: Any

    def layer(self, numbered: Numbered, given: Given) -> Layer:
        """Forward and transpose of the chunk as two programs.

        Args:
            numbered: All parameters.
            given: Shapes of what chunks get, parameters left out.
        """
        given = given.having(numbered.shapes_of(self.fixed))
        return Layer(self.apply, numbered.shapes_of(self.learning), self.input, given)

    def laid_out(self, tree: Any) -> Any:
        """What goes from chunk to chunk, as it lies on the stage's devices."""

        def one(x: Any, spec: PartitionSpec) -> Array:
            return jax.lax.with_sharding_constraint(x, NamedSharding(self.bound.mesh, spec))

        return jax.tree.map(one, tree, self.specs(tree))

    def specs(self, tree: Any) -> Any:
        """How what goes from chunk to chunk is split."""
        return jax.tree.map(lambda x: stream_spec(self.bound, x), tree)


def cut_chunks(
    loss: Loss,
    bound: BoundPlan,
    numbered: Numbered,
    given: Given,
    order: RowOrder,
) -> list[Chunk]:
    """The chunks of a loss, in the order of the model.

    Args:
        loss: See `Loss`.
        bound: Plan and all devices.
        numbered: All parameters.
        given: Shapes of what chunks get, parameters left out.
        order: Of the batch's rows.

    Raises:
        PlanError: The loss cannot be cut at one stack, or not where the plan says.

    Cost: traces the loss once for each chunk, and each layer of a kind once in it.
    """
    cuts, layout = bound.plan.pipeline.cuts or (), chunks_of(bound).layout
    ends = list(itertools.accumulate(cuts))
    chunks: list[Chunk] = []
    for position, (stage, _) in enumerate(layout):
        here = bound.stage(stage)
        with use(here), in_order(order):
            part = _Part(loss, numbered, given, len(layout), position)
            runs = part.between(ends[position] - cuts[position], ends[position])
            reads = part.reads(runs)
            learning = tuple(at for at in reads if numbered.learns[at])
            fixed = tuple(at for at in reads if not numbered.learns[at])
            apply = _under(here, order, part.apply(runs))
            before = chunks[-1] if chunks else None
            start: Any = () if before is None else before.output[0]
            if position == len(layout) - 1:
                start = (start, [each for chunk in chunks for each in chunk.output[1]])
            inputs = (numbered.shapes_of(learning), start, given.having(numbered.shapes_of(fixed)))
            output = jax.eval_shape(apply, *inputs, jnp.int32(0))
            chunks.append(
                Chunk(
                    position=position,
                    stage=stage,
                    bound=here,
                    learning=learning,
                    fixed=fixed,
                    apply=apply,
                    input=shapes_of(start),
                    output=shapes_of(output),
                )
            )
    return chunks


def _under(bound: BoundPlan, order: RowOrder, fn: Callable) -> Callable:
    """A function that is traced with a plan in force."""

    def inside(*args: Any) -> Any:
        with use(bound), in_order(order):
            return fn(*args)

    return inside


class _Part:
    """The loss as it is cut under one stage's plan."""

    def __init__(self, loss: Loss, numbered: Numbered, given: Given, count: int, at: int):
        self._numbered = numbered
        self._first, self._last = at == 0, at == count - 1
        params = dict(enumerate(numbered.shapes))
        args = jax.eval_shape(self._args, params, given, jnp.int32(0))
        self.cut: CutLoss = cut_loss(loss, *args)
        path = self.cut.runs[0].layers.key[0]
        problem = None
        if any(at < len(params) for at in self.cut.side_reads):
            problem = f"side inputs of the layers of stack '{path}' depend on parameters"
        elif self.cut.taps:
            problem = f"what layers of stack '{path}' give is read between them"
        if problem is not None:
            raise PlanError(
                f"plan.pipeline.cuts: {problem}, and programs of stages get the output of the"
                " layers before alone; give mesh axis 'stage' size 1"
            )

    def between(self, start: int, end: int) -> list[CutRun]:
        """Runs whose layers are these."""
        found = [run for run in self.cut.runs if start <= run.layers.first < end]
        covered = sum(run.layers.count * run.layers.group for run in found)
        if covered != end - start or found[0].layers.first != start:
            path = self.cut.runs[0].layers.key[0]
            raise PlanError(
                f"plan.pipeline.cuts: layers {start} to {end - 1} of stack '{path}' are no runs of"
                " their own; cut where its groups of layers begin"
            )
        return found

    def reads(self, runs: Sequence[CutRun]) -> list[int]:
        """Numbers of the parameters that these layers, and what stands beside them, read."""
        found = set().union(*(run.reads for run in runs))
        if self._first:
            found |= self.cut.before_reads
        if self._last:
            found |= self.cut.after_reads
        return sorted(at for at in found if at < len(self._numbered.shapes))

    def apply(self, runs: Sequence[CutRun]) -> Callable:
        """What a chunk computes; see `Chunk.apply`."""

        def apply(learning: Leaves, start: Any, given: Given, number: Array) -> tuple[Any, Any]:
            args = self._args({**learning, **given.fixed}, given, number)
            side = self.cut.side(*args)
            x, sums = start if self._last else (start, [])
            if self._first:
                x = self.cut.enter(*args)
            for run in runs:
                x, _, _, counted = Scanned().run(run.layers, run.params(*args), x, side, None, None)
                sums = [*sums, counted]
            if not self._last:
                return x, sums
            outputs = [(x, each) for each in sums]
            value, others = self.cut.after(args, outputs, self.cut.crossing(*args))
            return value, jax.lax.stop_gradient(others)

        return apply

    def _args(self, values: Leaves, given: Given, number: Array) -> tuple[Any, ...]:
        """Arguments of the loss for a microbatch; parameters that are not given are not read."""
        shapes = enumerate(self._numbered.shapes)
        leaves = {at: jnp.zeros(x.shape, x.dtype) for at, x in shapes if at not in values}
        arrays, key = jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, number, 0, keepdims=False),
            (given.arrays, given.keys),
        )
        params = self._numbered.tree({**values, **leaves})
        return params, arrays, key, given.weights, given.variables
