"""A loss cut into the chunks of stages that have programs of their own."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from colossax.config import BoundPlan
from colossax.errors import PlanError
from colossax.layerwise import Chain, Layer, LayerRun, Link, shapes_of, standing_in
from colossax.sharding import RowOrder, in_order, param_sharding, use
from colossax.sharding.rules import chunks_of
from colossax.step.programs.numbered import Leaves, Numbered
from colossax.step.programs.weights import Weights

Loss = Callable[..., Any]
"""`(parameters, microbatch, key, term weights, variables) -> (one number, others)`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Given:
    """What a stage's programs get beside parameters that learn; nothing of it is differentiated.

    Attributes:
        fixed: Parameters that do not learn, by number.
        arrays: Of the batch, `[microbatches, rows, ...]`.
        keys: `[microbatches]`; None: none.
        weights: See `Weighing`.
        variables: See `TrainState`.
        hosted: Parameters in host memory; see `Numbered.of_runs`.
    """

    fixed: Any
    arrays: Any
    keys: Any
    weights: Any
    variables: Any
    hosted: Any = None

    def having(self, fixed: dict[int, Any], hosted: Any = None) -> "Given":
        """The same with these parameters."""
        return dataclasses.replace(self, fixed=fixed, hosted=hosted)

    def of_one(self, weights: Weights) -> "Given":
        """Shapes of what one device along the batch gets; see `Weights.each`."""
        arrays, keys = weights.of_one((self.arrays, self.keys), 1)
        return dataclasses.replace(self, arrays=arrays, keys=keys)


_MAPPED: Any = Given(fixed=None, arrays=1, keys=1, weights=None, variables=None)
"""Where it has the dim of devices along the batch."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Chunk:
    """Layers of a stage that follow one another, with what stands before or behind them.

    Attributes:
        position: Its place in the model.
        stage: Who has it.
        weights: How it gets them, on that stage's devices.
        learning: Numbers of the parameters that it reads and that learn.
        fixed: Of those that do not, and are on the devices.
        runs: Of its layers, those with parameters in host memory.
        apply: `(learning, input, given, microbatch) -> (output, sums)`. The input of the first is
            (), of the last what comes and sums of all before; the output of the last one number,
            its sums what the loss gave beside it.
        input: Shapes of its input.
        output: Of its output and sums.
    """

    position: int
    stage: int
    weights: Weights
    learning: tuple[int, ...]
    fixed: tuple[int, ...]
    runs: frozenset[tuple[str, int]]
    apply: Callable[[Leaves, Any, Given, Array], tuple[Any, Any]]
    input: Any
    output: Any

    def layer(self, numbered: Numbered, given: Given) -> Layer:
        """Forward and transpose of the chunk as two programs.

        Args:
            numbered: All parameters.
            given: Shapes of what chunks get, parameters left out.
        """
        leaves = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=param_sharding(self.bound, "params", i))
            for x, i in zip(numbered.shapes, numbered.infos, strict=True)
        ]
        hosted = numbered.of_runs(self.runs, leaves) if self.runs else {}
        given = given.having(numbered.shapes_of(self.fixed), hosted)
        learning = _spread(self.weights, numbered, self.learning)
        return Layer(self.apply, learning, self.input, given)

    @property
    def bound(self) -> BoundPlan:
        """The plan on its stage's devices."""
        return self.weights.here


def cut_chunks(
    loss: Loss,
    bound: BoundPlan,
    weights: Sequence[Weights],
    numbered: Numbered,
    given: Given,
    order: RowOrder,
) -> list[Chunk]:
    """The chunks of a loss, in the order of the model.

    Args:
        loss: See `Loss`.
        bound: Plan and all devices.
        weights: Of each stage.
        numbered: All parameters.
        given: Shapes of what chunks get, parameters left out.
        order: Of the batch's rows.

    Raises:
        PlanError: The loss cannot be cut, or not where the plan says.

    Cost: traces the loss once for each chunk, and each layer of a kind once in it.
    """
    cuts, layout = bound.plan.pipeline.cuts or (), chunks_of(bound).layout
    ends = list(itertools.accumulate(cuts))
    chunks: list[Chunk] = []
    for position, (stage, _) in enumerate(layout):
        own = weights[stage]
        with use(own.inside), in_order(order):
            of_one = given.of_one(own)
            part = _Part(loss, numbered, of_one, len(layout), position)
            link = part.link(ends[position] - cuts[position], ends[position])
            reads = sorted(at for at in link.reads if at < len(numbered.shapes))
            learning = tuple(at for at in reads if numbered.learns[at])
            away = [at for at in reads if numbered.infos[at].on_host]
            fixed = tuple(at for at in reads if not numbered.learns[at] and at not in away)
            axes = (own.places(numbered.infos, learning), 0, _MAPPED, None)
            apply = own.each(_under(own.inside, order, part.apply(link)), axes)
            before = chunks[-1] if chunks else None
            start: Any = () if before is None else before.output[0]
            if position == len(layout) - 1:
                start = (start, [each for chunk in chunks for each in chunk.output[1]])
            shapes = _spread(own, numbered, learning)
            inputs = (shapes, start, given.having(numbered.shapes_of(fixed)))
            output = jax.eval_shape(apply, *inputs, jnp.int32(0))
            chunks.append(
                Chunk(
                    position=position,
                    stage=stage,
                    weights=own,
                    learning=learning,
                    fixed=fixed,
                    runs=numbered.hosted(away),
                    apply=apply,
                    input=shapes_of(start),
                    output=shapes_of(output),
                )
            )
    return chunks


def _spread(weights: Weights, numbered: Numbered, numbers: Sequence[int]) -> dict[int, Any]:
    """Shapes of parameters, as chunks are differentiated by them."""
    spread = functools.partial(weights.spread, numbered.infos)
    return jax.eval_shape(spread, numbered.shapes_of(numbers))


def _under(bound: BoundPlan, order: RowOrder, fn: Callable) -> Callable:
    """A function that is traced with a plan in force."""

    def inside(*args: Any) -> Any:
        given: Given = args[2]
        with use(bound), in_order(order), standing_in(given.hosted or {}):
            return fn(*args)

    return inside


class _Part:
    """The loss as it is cut under one stage's plan."""

    def __init__(self, loss: Loss, numbered: Numbered, given: Given, count: int, at: int):
        self._numbered = numbered
        self._last = at == count - 1
        params = dict(enumerate(numbered.shapes))
        args = jax.eval_shape(self._args, params, given, jnp.int32(0))
        self._chain = Chain(loss, *args)

    def link(self, start: int, end: int) -> Link:
        """That of the runs whose layers are these."""
        runs = self._chain.runs
        names = list(dict.fromkeys(repr(run.key[0]) for run in runs))
        if sorted(runs, key=_first) != list(runs):
            raise PlanError(
                f"plan.pipeline.cuts: the loss calls the layer stacks {', '.join(names)} in another"
                " order than the model makes them, in which their layers are numbered; make them in"
                " the order of the calls"
            )
        found = [at for at, run in enumerate(runs) if start <= _first(run) < end]
        covered = sum(runs[at].count * runs[at].group for at in found)
        if covered != end - start or _first(runs[found[0]]) != start:
            raise PlanError(
                f"plan.pipeline.cuts: layers {start} to {end - 1} of {', '.join(names)} are no runs"
                " of their own; cut where groups of layers begin"
            )
        return self._chain.link(found[0], found[-1] + 1)

    def apply(self, link: Link) -> Callable:
        """What a chunk computes; see `Chunk.apply`."""

        def apply(learning: Leaves, start: Any, given: Given, number: Array) -> tuple[Any, Any]:
            args = self._args({**learning, **given.fixed}, given, number)
            values, sums = start if self._last else (start, [])
            out, own = link.apply(args, values, sums)
            if not self._last:
                return out, own
            value, others = out
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


def _first(run: LayerRun) -> int:
    """Number of a run's first layer among those of all stacks."""
    return run.before + run.first
