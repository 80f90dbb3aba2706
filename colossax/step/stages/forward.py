"""A loss on its way forward through the stages, a tick at a time."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from colossax.config import BoundPlan, MeshAxis
from colossax.errors import PlanError
from colossax.layerwise import CutLoss, cut_loss, over_stages, shapes_of, stage_layers
from colossax.offload import stage_segments, to_device
from colossax.pipeline.routes import Block, Cells, Phase, Routes
from colossax.sharding import use
from colossax.step.microbatches import Microbatches
from colossax.step.stages import rings
from colossax.step.stages.gathered import gathered_once, whole
from colossax.step.stages.order import in_order, to_their_stages
from colossax.step.stages.travel import Travel
from colossax.typing import Params

Loss = Callable[..., Any]
"""`(parameters outside of stacks, those of stacks, microbatch, key, term weights) -> anything`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ahead:
    """What goes from tick to tick on the way forward.

    Attributes:
        arrived: Inputs that were sent, of each way `[slots, stages, ...]`.
        counted: Sums of layers, `[slots, stages, layers, ...]`.
    """

    arrived: Any
    counted: Any


jax.tree_util.register_dataclass(Ahead, ["arrived", "counted"], [])


class Stages:
    """A loss cut at its stack, whose layers the stages share; while a program is traced.

    Attributes:
        cut: The loss.
        layers: What a stage does with its layers.
        rows: Their parameters, of each chunk `[stages, layers, ...]`.
        infos: Of those.
        outer: Parameters outside of the stack.
        travel: What goes from stage to stage.
        numbers: Of the stages.
        routes: Of the table.
    """

    def __init__(
        self,
        loss: Loss,
        bound: BoundPlan,
        infos: Any,
        params: tuple[Params, Params],
        micro: Microbatches,
        routes: Routes,
    ):
        """Cut the loss, trace a layer.

        Args:
            loss: See `Loss`.
            bound: Plan and devices.
            infos: Of the parameters of stacks.
            params: Outside of stacks, and of stacks.
            micro: The global batch.
            routes: Of the table.

        Raises:
            PlanError: It cannot be cut at one stack, or the stages cannot share its layers.
        """
        self.outer, self._inner = params
        self._micro, self.routes = micro, routes
        first = (*params, *micro.first, micro.weighing)
        self.cut: CutLoss = cut_loss(loss, *first)
        outer, inner = (len(jax.tree.leaves(tree)) for tree in params)
        check_cut(self.cut, range(outer, outer + inner), range(outer + inner))
        self.count = bound.mesh.shape[MeshAxis.STAGE]
        _check_runs(self.cut, bound, len(routes.order))
        carry, side, _ = jax.eval_shape(self.cut.before, *first)
        rows = [run.params(*first) for run in self.cut.runs]
        self.rows = tuple(jax.tree.map(self._shared, each) for each in rows)
        self.infos, inside = self._infos(infos), bound
        self.rows = to_their_stages(bound, "params", self.rows, self.infos, routes.order)
        if bound.plan.pipeline.gather == "step":
            self.rows, inside = gathered_once(bound, self.rows, self.infos), whole(bound)
        shapes = [jax.tree.map(_merged, shapes_of(each)) for each in self.rows]
        with use(inside):
            segments = stage_segments(bound.plan, sum(run.layers.count for run in self.cut.runs))
            runs = self.cut.runs, shapes, self.count
            self.layers = stage_layers(*runs, carry, side, segments)
        self.travel = Travel(bound, carry)
        self.numbers = jnp.arange(self.count, dtype=jnp.int32)

    def _infos(self, infos: Any) -> tuple[Any, ...]:
        """Of the runs' parameters, like `rows`."""
        known, skipped = jax.tree.leaves(infos), len(jax.tree.leaves(self.outer))
        return tuple(
            jax.tree.unflatten(
                jax.tree.structure(each),
                [known[at - skipped] for at in run.leaves if at is not None],
            )
            for run, each in zip(self.cut.runs, self.rows, strict=True)
        )

    def _shared(self, x: Array) -> Array:
        """`[layers, ...]` as `[stages, layers of a stage, ...]`."""
        return x.reshape(self.count, -1, *x.shape[1:])

    def args(self, number: Array, outer: Params | None = None) -> tuple[Any, ...]:
        """Arguments of the loss for a microbatch; -1 counts as the first."""
        micro = self._micro
        arrays, key = jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, jnp.maximum(number, 0), 0, keepdims=False),
            (micro.arrays, micro.keys),
        )
        outer = self.outer if outer is None else outer
        return outer, self._inner, arrays, key, micro.weighing

    def side(self, number: Array) -> Any:
        """What all layers get of a microbatch."""
        return self.cut.side(*self.args(number))

    def enter(self, outer: Params, number: Array) -> Any:
        """Input of the first layer."""
        return self.cut.before(*self.args(number, outer))[0]

    def leave(self, outer: Params, number: Array, last: Any, sums: Any) -> Any:
        """The loss of a microbatch.

        Args:
            outer: Parameters outside of the stack.
            number: Of the microbatch.
            last: What the last layer gave.
            sums: What the layers counted, of each run `[layers, ...]`.
        """
        args = self.args(number, outer)
        outputs = [(last, each) for each in sums]
        return self.cut.after(args, outputs, self.cut.before(*args)[2])

    def parts(self, chunk: Array) -> Array:
        """Of a chunk of each stage, the part that the stage has; see `Routes.order`."""
        order = self.routes.order
        if in_order(order):
            return self.numbers
        return jnp.asarray(order)[chunk, self.numbers]

    def start(self) -> Ahead:
        """Nothing has been sent."""
        _, counted = self.kept_shapes()
        return Ahead(
            arrived=self.travel.rings(self.routes.waiting, self.count),
            counted=rings.empty(counted, self.routes.counted, lead=(self.count,)),
        )

    def kept_shapes(self) -> Any:
        """Of what one stage's layers keep, and of what they count, `[layers, ...]`."""

        def one() -> Any:
            zero = jnp.int32(0)
            rows = jax.tree.map(lambda x: to_device(x)[0], self.rows)
            return self.layers.forward(rows, zeros(self.travel.shapes), self.side(zero), zero, zero)

        return jax.eval_shape(one)[1]

    def forward(
        self, ahead: Ahead, tick: Array, cells: Any, enters: Array | None
    ) -> tuple[Any, Any, Any]:
        """All stages' forward passes of a tick.

        Args:
            ahead: State before it.
            tick: Its number.
            cells: What the table says of it, `[stages]` each; see `Cells`.
            enters: The microbatch that comes to the first layer; None: none does.

        Returns:
            What the stages give, the state with what they counted, and what they keep.
        """
        carry = rings.sent(ahead.arrived, cells)
        if enters is not None:
            start = jax.tree.map(lambda x: x[None], self.enter(self.outer, enters))
            at_first = (self.numbers == self.routes.first) & (cells["chunk"] == 0)
            carry = rings.chosen(at_first, start, carry)

        def one(rows: Any, carry: Any, number: Array, chunk: Array, part: Array) -> Any:
            return self.layers.forward(rows, carry, self.side(number), chunk, part)

        number, cell = cells["microbatch"], (cells["chunk"], self.parts(cells["chunk"]))
        carry = self.travel.laid_out(carry)
        if self.layers.fetches:
            side = over_stages(self.side)(number)
            found = self.layers.forward_fetching(self.rows, carry, side, *cell)
        else:
            found = over_stages(one)(self.rows, carry, number, *cell)
        out, (kept, sums) = found
        ahead = dataclasses.replace(ahead, counted=rings.put(ahead.counted, tick, sums))
        return self.travel.laid_out(out), ahead, kept

    def send(self, ahead: Ahead, tick: Array, out: Any) -> Ahead:
        """To the next stage, where it has arrived when the tick is over."""
        sent = tuple(self.travel.rolled(out, way) for way in self.routes.ways)
        return dataclasses.replace(ahead, arrived=rings.put(ahead.arrived, tick, sent))

    def counted(self, ahead: Ahead, ticks: np.ndarray, number: Array) -> list[Any]:
        """What the layers counted of a microbatch, of each run `[layers, ...]`.

        Args:
            ahead: State.
            ticks: `[microbatches, chunks, stages]`, of the forward passes.
            number: Of the microbatch.
        """
        if not jax.tree.leaves(ahead.counted):
            return [ahead.counted for _ in self.rows]
        at = jnp.asarray(ticks)[jnp.maximum(number, 0)]
        found = [rings.slots(ahead.counted, at[chunk]) for chunk in range(len(self.rows))]
        if not in_order(self.routes.order):
            stages = [np.argsort(parts) for parts in self.routes.order]
            pairs = zip(found, stages, strict=True)
            found = [jax.tree.map(lambda x, of=of: x[of], each) for each, of in pairs]
        return [jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), each) for each in found]


def through(routes: Routes, tick: Callable[[Phase, Any, Any], Any], state: Any) -> Any:
    """The state after all ticks.

    Args:
        routes: Of the table.
        tick: `(phase, state, (number, forward, backward and weight cells, plain)) -> state`.
        state: Before the first.

    Cost: program size of one tick for each phase that is said, whatever the number of ticks.
    """

    def once(block: Block, state: Any, said: Any) -> tuple[Any, None]:
        start = block.phases[0].start
        for phase in block.phases:
            xs = jax.tree.map(lambda x, p=phase: x[p.start - start : p.stop - start], said)
            body = functools.partial(_body, tick, phase)
            state, _ = jax.lax.scan(body, state, xs)
        return state, None

    for block in routes.blocks:
        start = block.phases[0].start
        said = _said(routes, start, start + block.repeats * block.ticks)
        said = jax.tree.map(lambda x, n=block.repeats: x.reshape(n, -1, *x.shape[1:]), said)
        if block.repeats == 1:
            state, _ = once(block, state, jax.tree.map(lambda x: x[0], said))
        else:
            state, _ = jax.lax.scan(functools.partial(once, block), state, said)
    return state


def _body(tick: Callable, phase: Phase, state: Any, xs: Any) -> tuple[Any, None]:
    return tick(phase, state, xs), None


def _said(routes: Routes, start: int, stop: int) -> Any:
    """What the table says of these ticks."""

    def cells(one: Cells) -> dict[str, np.ndarray]:
        return {f.name: getattr(one, f.name)[start:stop] for f in dataclasses.fields(one)}

    plain = {n: getattr(routes, n)[start:stop] for n in ("enters", "ends", "turns", "returns")}
    ticks = np.arange(start, stop, dtype=np.int32)
    return ticks, cells(routes.forward), cells(routes.backward), cells(routes.weight), plain


def _merged(x: Any) -> Any:
    """Shape of `[stages, layers of a stage, ...]` as `[layers, ...]`."""
    return jax.ShapeDtypeStruct((x.shape[0] * x.shape[1], *x.shape[2:]), x.dtype)


def zeros(shapes: Any) -> Any:
    """Arrays of these shapes."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def by_stack(tree: Any, infos: Any) -> tuple[Any, Any]:
    """Leaves outside of layer stacks, and those of stacks, None in place of each other."""

    def only(stacked: bool) -> Any:
        return jax.tree.map(
            lambda info, x: x if (info.segment is not None) == stacked else None, infos, tree
        )

    return only(False), only(True)


def _check_runs(cut: CutLoss, bound: BoundPlan, chunks: int) -> None:
    """Refuse runs of layers that are not the chunks of the stages."""
    path, counts = cut.runs[0].layers.key[0], tuple(run.layers.count for run in cut.runs)
    if len(counts) != chunks:
        raise PlanError(
            f"plan.segments: layer stack '{path}' has runs of {counts} layers, and stages that"
            f" share one program want one for each of plan.pipeline.chunks {chunks}; give all"
            " layers one segment, or each stage programs of its own with plan.pipeline.cuts"
        )
    segments = stage_segments(bound.plan, sum(counts))
    each = sum(segment.count for segment in segments)
    if segments and each * bound.mesh.shape[MeshAxis.STAGE] * chunks != sum(counts):
        raise PlanError(
            f"plan.segments: counts {tuple(s.count for s in segments)} are {each} layers, and each"
            f" of {bound.mesh.shape[MeshAxis.STAGE]} stages has"
            f" {sum(counts) // bound.mesh.shape[MeshAxis.STAGE]}"
            + (f" in {chunks} chunks" if chunks > 1 else "")
            + "; give counts that sum to those of a chunk"
        )


def check_cut(cut: CutLoss, of_stack: Iterable[int], of_all: Iterable[int]) -> None:
    """Refuse a loss that stages cannot share.

    Args:
        cut: The loss.
        of_stack: Which leaves of its arguments are parameters of the stack.
        of_all: Which are parameters.

    Raises:
        PlanError: What it does that they cannot.
    """
    path = cut.runs[0].layers.key[0]
    stack, own = set(of_stack), set(of_all)
    problem = None
    if any(run.layers.group != 1 for run in cut.runs):
        problem = f"layers of stack '{path}' are of kinds that take turns"
    elif any(at not in stack for run in cut.runs for at in run.leaves):
        problem = f"parameters of layer stack '{path}' are computed"
    elif (cut.before_reads | cut.after_reads) & stack:
        problem = f"the loss reads parameters of layer stack '{path}' outside of it"
    elif cut.side_reads & own:
        problem = f"side inputs of the layers of stack '{path}' depend on parameters"
    elif cut.taps:
        problem = f"what layers of stack '{path}' give is read between them"
    if problem is not None:
        raise PlanError(
            f"mesh axis 'stage': {problem}, and stages cannot share one program; give each its own"
            " with plan.pipeline.cuts, the layers of each stage, or give 'stage' size 1"
        )
