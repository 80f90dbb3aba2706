"""Gradients of a loss whose layers are shared by the stages of a pipeline, in one program."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from colossax.config import BoundPlan, MeshAxis
from colossax.errors import PlanError
from colossax.layerwise import CutLoss, StageLayers, added, cut_loss, nothing, over_stages
from colossax.layerwise.layer import shapes_of
from colossax.pipeline.routes import Block, Cells, Phase, Routes, routes_of
from colossax.pipeline.table import Table
from colossax.sharding import param_sharding
from colossax.step.gradients.accumulate import LossCall, objective, summarised
from colossax.step.gradients.method import GradientMethod, Gradients
from colossax.step.gradients.sums import accumulable, constrained
from colossax.step.gradients.travel import Travel
from colossax.step.microbatches import Microbatches
from colossax.step.trainable import joined, split
from colossax.typing import ParamInfo, Params

STAGE = MeshAxis.STAGE.value


def pipelined(
    call: LossCall, bound: BoundPlan, infos: Any, trainable: Any, table_of: Callable[[int], Table]
) -> GradientMethod:
    """Microbatches on their way through the stages, as a table says; see docs/design/pipeline.md.

    Args:
        call: The loss.
        bound: Plan and devices, several of them along `stage`.
        infos: Of the parameters that learn, None elsewhere.
        trainable: Tree of booleans.
        table_of: Number of microbatches to a table.

    Raises:
        PlanError: The loss cannot be cut at one stack, or its layers not be shared; when traced.
    """

    def gradients(params: Params, variables: Any, micro: Microbatches) -> Gradients:
        learning, frozen = split(params, trainable)
        inner, outer = _by_stack(learning, infos)

        def value(outer: Params, inner: Params, microbatch: Any, key: Any, weights: Any) -> Any:
            whole = joined(joined(outer, inner), frozen)
            return objective(*call(whole, microbatch, variables, key), weights)

        first = (outer, inner, *micro.first, micro.term_weights)
        cut = cut_loss(value, *first)
        routes = routes_of(table_of(micro.count))
        job = _Job(cut, bound, infos, routes, (outer, inner), micro)
        grads, sums = job.run()
        return summarised(infos, constrained(bound, infos, grads), sums)

    return gradients


def _by_stack(params: Params, infos: Any) -> tuple[Params, Params]:
    """Parameters of layer stacks, and the others, None in place of each other."""

    def chosen(stacked: bool) -> Params:
        return jax.tree.map(
            lambda info, x: x if (info.segment is not None) == stacked else None, infos, params
        )

    return chosen(True), chosen(False)


@dataclasses.dataclass
class _State:
    """What goes from tick to tick.

    Attributes:
        arrived: Inputs that were sent, `[slots, stages, ...]`.
        returned: Gradients that were sent, likewise.
        turned: Gradients of the loss, `[slots, ...]`.
        kept: What forward keeps, and sums, `[slots, stages, layers, ...]`.
        dsums: Gradients by the sums of layers, by slot of the tick of the loss.
        grads: Of the stages' layers, by chunk, `[stages, layers, ...]`.
        outer: Of the other parameters.
        sums: Loss, terms and metrics.
    """

    arrived: Any
    returned: Any
    turned: Any
    kept: Any
    dsums: Any
    grads: Any
    outer: Any
    sums: Any


jax.tree_util.register_dataclass(_State, [f.name for f in dataclasses.fields(_State)], [])


class _Job:
    """One global batch, while its program is traced."""

    def __init__(
        self,
        cut: CutLoss,
        bound: BoundPlan,
        infos: Any,
        routes: Routes,
        params: tuple[Params, Params],
        micro: Microbatches,
    ):
        self.cut, self.bound, self.infos, self.routes, self.micro = cut, bound, infos, routes, micro
        self.outer, self.inner = params
        self.stages = bound.mesh.shape[STAGE]
        self._leaves, self._structure = jax.tree.flatten(self.inner)
        self._skipped = len(jax.tree.leaves(self.outer))
        _check(cut, self._skipped, len(self._leaves))
        args = (*params, *micro.first, micro.term_weights)
        carry, side, _ = jax.eval_shape(cut.before, *args)
        rows = [run.params(*args) for run in cut.runs]
        self.layers = StageLayers(cut.runs, shapes_of(rows), self.stages, carry, side)
        self.travel = Travel(bound, carry)
        self.rows = tuple(jax.tree.map(self._split, each) for each in rows)
        self._numbers = jnp.arange(self.stages, dtype=jnp.int32)

    def _split(self, x: Array) -> Array:
        """`[layers, ...]` as `[stages, layers of a stage, ...]`."""
        return x.reshape(self.stages, -1, *x.shape[1:])

    def args(self, number: Array, outer: Params | None = None) -> tuple[Any, ...]:
        """Arguments of the loss for a microbatch."""
        arrays, key = jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, number, 0, keepdims=False),
            (self.micro.arrays, self.micro.keys),
        )
        outer = self.outer if outer is None else outer
        return outer, self.inner, arrays, key, self.micro.term_weights

    def side(self, number: Array) -> Any:
        """What all layers get of a microbatch."""
        return self.cut.side(*self.args(number))

    def enter(self, outer: Params, number: Array) -> Any:
        """Input of the first layer."""
        return self.cut.before(*self.args(number, outer))[0]

    def run(self) -> tuple[Params, Any]:
        """Gradients of all parameters, and what was added up beside them."""
        state = self._start()
        for block in self.routes.blocks:
            start = block.phases[0].start
            said = self._said(start, start + block.repeats * block.ticks)
            said = jax.tree.map(lambda x, n=block.repeats: x.reshape(n, -1, *x.shape[1:]), said)
            once = functools.partial(self._once, block)
            if block.repeats > 1:
                state, _ = jax.lax.scan(once, state, said)
            else:
                state, _ = once(state, jax.tree.map(lambda x: x[0], said))
        return self._whole(state), state.sums

    def _once(self, block: Block, state: _State, said: Any) -> tuple[_State, None]:
        """The phases of a block."""
        start = block.phases[0].start
        for phase in block.phases:
            ticks = slice(phase.start - start, phase.stop - start)
            xs = jax.tree.map(lambda x, at=ticks: x[at], said)
            state, _ = jax.lax.scan(functools.partial(self._tick, phase), state, xs)
        return state, None

    def _said(self, start: int, stop: int) -> Any:
        """What the table says of these ticks."""
        routes = self.routes

        def cells(one: Cells) -> dict[str, np.ndarray]:
            return {f.name: getattr(one, f.name)[start:stop] for f in dataclasses.fields(one)}

        plain = {n: getattr(routes, n)[start:stop] for n in ("enters", "ends", "turns", "returns")}
        ticks = np.arange(start, stop, dtype=np.int32)
        return ticks, (cells(routes.forward), cells(routes.backward), plain)

    def _tick(self, phase: Phase, state: _State, xs: Any) -> tuple[_State, None]:
        tick, (ahead, back, plain) = xs
        sent, returned = None, None
        if phase.forward:
            out, state = self._forward(state, tick, ahead, plain)
            if phase.loss:
                state = self._loss(state, tick, out, plain)
            sent = self.travel.rolled(out, 1)
        if phase.backward:
            before, state = self._backward(state, back, plain)
            returned = self.travel.rolled(before, -1)
        if sent is not None:
            state = dataclasses.replace(state, arrived=_put(state.arrived, tick, sent))
        if returned is not None:
            state = dataclasses.replace(state, returned=_put(state.returned, tick, returned))
        return state, None

    def _forward(self, state: _State, tick: Array, cells: Any, plain: Any) -> tuple[Any, _State]:
        """What stages make of their inputs, which they keep what backward needs of."""
        start = self.enter(self.outer, jnp.maximum(plain["enters"], 0))
        arrived = _taken(state.arrived, cells["source"])
        at_first = (self._numbers == 0) & (cells["chunk"] == 0)
        carry = self.travel.laid_out(_chosen(at_first, jax.tree.map(_lifted, start), arrived))

        def one(rows: Any, carry: Any, number: Array, chunk: Array, stage: Array) -> Any:
            return self.layers.forward(rows, carry, self.side(number), chunk, stage)

        inputs = (self.rows, carry, cells["microbatch"], cells["chunk"], self._numbers)
        out, kept = over_stages(one)(*inputs)
        state = dataclasses.replace(state, kept=_put(state.kept, tick, self._held(kept)))
        return self.travel.laid_out(out), state

    def _held(self, kept: Any) -> Any:
        return kept

    def _loss(self, state: _State, tick: Array, out: Any, plain: Any) -> _State:
        """The loss of the microbatch that has passed the last layer, and its gradients."""
        number = jnp.maximum(plain["ends"], 0)
        last = self.travel.of_stage(out, self.stages - 1)
        sums = self._sums_of(state, number)

        def value(outer: Params, last: Any, sums: Any) -> Any:
            args = self.args(number, outer)
            outputs = [(last, each) for each in sums]
            return self.cut.after(args, outputs, self.cut.before(*args)[2])

        differentiate = jax.value_and_grad(value, argnums=(0, 1, 2), has_aux=True)
        (loss, more), (grads, turned, dsums) = differentiate(self.outer, last, sums)
        return dataclasses.replace(
            state,
            outer=self._added(state.outer, grads),
            turned=_put(state.turned, tick, turned),
            dsums=_put(state.dsums, tick, dsums),
            sums=added(state.sums, (loss, more)),
        )

    def _sums_of(self, state: _State, number: Array) -> list[Any]:
        """What the layers counted of a microbatch, by chunk, `[layers, ...]`."""
        _, sums = state.kept
        if not jax.tree.leaves(sums):
            return [jax.tree.map(lambda x: x, sums) for _ in self.rows]
        ticks = jnp.asarray(self._forward_ticks())[number]  # [chunks, stages]
        found = [_taken(sums, ticks[chunk]) for chunk in range(len(self.rows))]
        return [jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), each) for each in found]

    def _forward_ticks(self) -> np.ndarray:
        """`[microbatches, chunks, stages]`."""
        cells = self.routes.forward
        ticks = np.zeros((self.micro.count, len(self.rows), self.stages), np.int32)
        for tick, stage in zip(*np.nonzero(cells.active), strict=True):
            ticks[cells.microbatch[tick, stage], cells.chunk[tick, stage], stage] = tick
        return ticks

    def _backward(self, state: _State, cells: Any, plain: Any) -> tuple[Any, _State]:
        """Gradients of the stages' inputs; those of parameters are added to what there is."""
        at_last = (self._numbers == self.stages - 1) & (cells["chunk"] == len(self.rows) - 1)
        turned = jax.tree.map(_lifted, _of_slot(state.turned, plain["turns"]))
        after = _chosen(at_last, turned, _taken(state.returned, cells["source"]))
        after = self.travel.laid_out(after)
        kept, _ = _taken(state.kept, cells["forward"])

        def one(
            rows: Any, grads: Any, after: Any, kept: Any, number: Any, chunk: Any, stage: Any, on: Any
        ) -> Any:
            dsums = self._dsums(state, number, chunk, stage)
            side = self.side(number)
            return self.layers.backward(
                rows, grads, (after, dsums), side, kept, chunk, stage, on
            )

        cell = (cells["microbatch"], cells["chunk"], self._numbers, cells["active"])
        before, grads = over_stages(one)(self.rows, state.grads, after, kept, *cell)
        before = self.travel.laid_out(before)
        returns = plain["returns"]
        start = self.travel.of_stage(before, 0)
        start = jax.tree.map(lambda x: jnp.where(returns >= 0, x, jnp.zeros_like(x)), start)
        _, pull = jax.vjp(lambda outer: self.enter(outer, jnp.maximum(returns, 0)), self.outer)
        outer = self._added(state.outer, pull(start)[0])
        return before, dataclasses.replace(state, grads=self._laid_out(grads), outer=outer)

    def _dsums(self, state: _State, number: Array, chunk: Array, stage: Array) -> Any:
        """Of one stage: gradients by the sums of its chunk's layers."""
        if not jax.tree.leaves(state.dsums):
            return state.dsums[0]
        ended = jnp.asarray(self._forward_ticks()[:, -1, -1])[number]
        whole = _of_slot(state.dsums, ended)
        found = whole[0]
        for at, more in enumerate(whole[1:], 1):
            found = jax.tree.map(lambda a, b, n=at: jnp.where(chunk == n, b, a), found, more)
        start, count = stage * self.layers.count, self.layers.count
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, count), found)

    def _added(self, so_far: Params, more: Params) -> Params:
        infos = _only(self.infos, so_far)
        more = accumulable(self.bound, infos, more)
        return constrained(self.bound, infos, jax.tree.map(jnp.add, so_far, more))

    def _laid_out(self, grads: Any) -> Any:
        """Gradients of the stages' layers where the plan wants them."""
        if self.bound.single:
            return grads
        out = []
        for run, each in zip(self.cut.runs, grads, strict=True):
            leaves, structure = jax.tree.flatten(each)
            infos = [self._info(at) for at in run.leaves]
            laid = [self._constrained(x, info) for x, info in zip(leaves, infos, strict=True)]
            out.append(jax.tree.unflatten(structure, laid))
        return tuple(out)

    def _info(self, at: int | None) -> ParamInfo:
        assert at is not None
        return jax.tree.leaves(_only(self.infos, self.inner))[at - self._skipped]

    def _constrained(self, x: Array, info: ParamInfo) -> Array:
        spec = param_sharding(self.bound, "gradients", info).spec
        rest = tuple(spec)[1:]
        sharding = NamedSharding(self.bound.mesh, PartitionSpec(STAGE, None, *rest))
        return jax.lax.with_sharding_constraint(x, sharding)

    def _start(self) -> _State:
        """Nothing has been done."""
        routes, dtype = self.routes, self.bound.plan.precision.accumulation
        carry = self.travel.shapes
        number = jax.ShapeDtypeStruct((), jnp.int32)
        stage_shapes = functools.partial(self._stage_shapes, number)
        kept = jax.eval_shape(stage_shapes)
        infos = _only(self.infos, self.outer)
        outer = jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), self.outer)
        grads = jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), self.rows)
        sums = [
            jax.tree.map(lambda x: _joined(x, self.stages), kept[1]) for _ in range(len(self.rows))
        ]
        loss = jax.eval_shape(self._loss_shapes, self.outer, sums)
        across = functools.partial(_zeros, lead=(self.stages,))
        return _State(
            arrived=self.travel.stored(across(carry, routes.waiting)),
            returned=self.travel.stored(across(carry, routes.returning)),
            turned=_zeros(carry, routes.turning),
            kept=across(kept, routes.kept),
            dsums=_zeros(sums, routes.kept),
            grads=self._laid_out(grads),
            outer=constrained(self.bound, infos, outer),
            sums=nothing(loss),
        )

    def _stage_shapes(self, number: Any) -> Any:
        zero = jnp.int32(0)
        rows = jax.tree.map(lambda x: x[0], self.rows)
        carry = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.travel.shapes)
        return self.layers.forward(rows, carry, self.side(zero), zero, zero)[1]

    def _loss_shapes(self, outer: Params, sums: Any) -> Any:
        args = self.args(jnp.int32(0), outer)
        carry = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.travel.shapes)
        outputs = [(carry, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), s)) for s in sums]
        return self.cut.after(args, outputs, self.cut.before(*args)[2])

    def _whole(self, state: _State) -> Params:
        """All gradients, as the parameters are."""
        leaves: list[Any] = [None] * len(self._leaves)
        for run, grads in zip(self.cut.runs, state.grads, strict=True):
            for at, grad in zip(run.leaves, jax.tree.leaves(grads), strict=True):
                assert at is not None
                whole = grad.reshape(-1, *grad.shape[2:])
                leaves[at - self._skipped] = whole
        return joined(jax.tree.unflatten(self._structure, leaves), state.outer)


def _joined(x: Any, stages: int) -> Any:
    return jax.ShapeDtypeStruct((stages * x.shape[0], *x.shape[1:]), x.dtype)


def _only(tree: Any, like: Any) -> Any:
    """`tree` where `like` has leaves."""
    return jax.tree.map(
        lambda x, info: None if x is None else info, like, tree, is_leaf=lambda x: x is None
    )


def _lifted(x: Array) -> Array:
    return x[None]


def _chosen(where: Array, one: Any, other: Any) -> Any:
    """By stage, one tree or the other."""

    def of(a: Array, b: Array) -> Array:
        return jnp.where(where.reshape(-1, *[1] * (b.ndim - 1)), a, b)

    return jax.tree.map(of, one, other)


def _zeros(shapes: Any, slots: int, *, lead: Sequence[int] = ()) -> Any:
    return jax.tree.map(lambda x: jnp.zeros((slots, *lead, *x.shape), x.dtype), shapes)


def _put(ring: Any, tick: Array, values: Any) -> Any:
    """A ring with these values in the tick's slot."""

    def one(x: Array, value: Array) -> Array:
        return jax.lax.dynamic_update_index_in_dim(x, value.astype(x.dtype), tick % x.shape[0], 0)

    return jax.tree.map(one, ring, values)


def _of_slot(ring: Any, tick: Array) -> Any:
    def one(x: Array) -> Array:
        return jax.lax.dynamic_index_in_dim(x, tick % x.shape[0], 0, keepdims=False)

    return jax.tree.map(one, ring)


def _taken(ring: Any, ticks: Array) -> Any:
    """Of each stage what it had put there in a tick of its own."""

    def one(x: Array) -> Array:
        if x.shape[0] == 1:
            return x[0]
        return over_stages(_slot, in_axes=(1, 0))(x, ticks % x.shape[0])

    return jax.tree.map(one, ring)


def _slot(x: Array, at: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(x, at, 0, keepdims=False)


def _check(cut: CutLoss, outer: int, inner: int) -> None:
    """Refuse a loss that the stages cannot share.

    Raises:
        PlanError: With the reason.
    """
    path = cut.runs[0].layers.key[0]
    stack, own = set(range(outer, outer + inner)), set(range(outer + inner))
    if any(at not in stack for run in cut.runs for at in run.leaves):
        raise PlanError(
            f"mesh axis 'stage': parameters of layer stack '{path}' are computed, or do not learn,"
            " and cannot be shared by stages; give 'stage' size 1"
        )
    if cut.outside_reads & stack:
        raise PlanError(
            f"mesh axis 'stage': the loss reads parameters of layer stack '{path}' outside of it;"
            " give 'stage' size 1"
        )
    if cut.side_reads & own or cut.taps:
        what = "side inputs of its layers depend on parameters"
        if cut.taps:
            what = "what its layers give is read between them"
        raise PlanError(
            f"mesh axis 'stage': of layer stack '{path}', {what}; give 'stage' size 1"
        )
