"""Gradients of a loss whose layers the stages of a pipeline share, in one program for all."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from colossax.config import BoundPlan, MeshAxis
from colossax.layerwise import added, nothing, over_stages
from colossax.pipeline.routes import Phase, Routes, routes_of
from colossax.pipeline.table import Table
from colossax.sharding import batch_axes, param_sharding
from colossax.step.gradients.accumulate import LossCall, objective, summarised
from colossax.step.gradients.method import GradientMethod, Gradients
from colossax.step.gradients.sums import accumulable, constrained
from colossax.step.microbatches import Microbatches
from colossax.step.stages import rings
from colossax.step.stages.forward import Ahead, Stages, by_stack, through, zeros
from colossax.step.stages.reduced import reduced_once
from colossax.step.trainable import joined, split
from colossax.typing import ParamInfo, Params

_STAGE = MeshAxis.STAGE.value


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

        def found(bound: BoundPlan, learning: Params, micro: Microbatches) -> tuple[Params, Any]:
            def value(outer: Params, inner: Params, microbatch: Any, key: Any, weights: Any) -> Any:
                whole = joined(joined(outer, inner), frozen)
                return objective(*call(whole, microbatch, variables, key), weights)

            outer, inner = by_stack(learning, infos)
            both = by_stack(infos, infos)
            stages = Stages(value, bound, both[1], (outer, inner), micro)
            way = _BothWays(stages, bound, both, routes_of(table_of(micro.count)))
            state = through(way.routes, way.tick, way.start())
            return way.grads(state, inner), state.sums

        if bound.plan.batch.reduce_once and batch_axes(bound) and micro.count > 1:
            grads, sums = reduced_once(bound, infos, learning, micro, found)
        else:
            grads, sums = found(bound, learning, micro)
        return summarised(infos, constrained(bound, infos, grads), sums)

    return gradients


@dataclasses.dataclass(frozen=True, kw_only=True)
class _State:
    """What goes from tick to tick.

    Attributes:
        ahead: On the way forward.
        kept: What forward keeps for backward, `[slots, stages, layers, ...]`.
        turned: Gradients of the loss by the last layer's output, `[slots, ...]`.
        dsums: By the sums of layers, of each run `[slots, layers, ...]`.
        returned: Gradients that were sent, `[slots, stages, ...]`.
        grads: Of the stages' layers, of each chunk `[stages, layers, ...]`.
        outer: Of the other parameters.
        sums: Loss, terms and metrics.
    """

    ahead: Ahead
    kept: Any
    turned: Any
    dsums: Any
    returned: Any
    grads: Any
    outer: Any
    sums: Any


jax.tree_util.register_dataclass(_State, [f.name for f in dataclasses.fields(_State)], [])


class _BothWays:
    """Forward and backward passes of all stages, a tick at a time."""

    def __init__(self, stages: Stages, bound: BoundPlan, infos: tuple[Any, Any], routes: Routes):
        self.routes = routes
        self._stages, self._bound = stages, bound
        self._outer_infos, inner = infos
        self._stack_infos: list[ParamInfo] = jax.tree.leaves(inner)
        self._skipped = len(jax.tree.leaves(stages.outer))
        self._ticks = routes.forward_ticks

    def start(self) -> _State:
        """Nothing has been done."""
        stages, routes = self._stages, self.routes
        dtype, lead = self._bound.plan.precision.accumulation, (stages.count,)
        carry, (kept, _) = stages.travel.shapes, stages.kept_shapes()
        ahead = stages.start(routes)
        sums = jax.eval_shape(lambda: stages.counted(ahead, self._ticks, jnp.int32(0)))
        last = (jnp.int32(0), zeros(carry), zeros(sums))
        found = jax.eval_shape(lambda: stages.leave(stages.outer, *last))
        wide = jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), (stages.rows, stages.outer))
        return _State(
            ahead=ahead,
            kept=self._laid_kept(rings.empty(kept, routes.kept, lead=lead)),
            turned=rings.empty(carry, routes.turning),
            dsums=rings.empty(sums, routes.kept),
            returned=stages.travel.stored(rings.empty(carry, routes.returning, lead=lead)),
            grads=self._laid_out(wide[0]),
            outer=constrained(self._bound, self._outer_infos, wide[1]),
            sums=nothing(found),
        )

    def tick(self, phase: Phase, state: _State, xs: Any) -> _State:
        """The state after a tick."""
        now, ahead, back, plain = xs
        out = before = None
        if phase.forward:
            enters = plain["enters"] if phase.enters else None
            out, state = self._forward(state, now, ahead, enters)
        if phase.loss:
            state = self._loss(state, now, out, plain["ends"])
        if phase.backward:
            before, state = self._backward(state, back, plain["turns"])
        if phase.returns:
            grads = self._entered(before, plain["returns"])
            state = dataclasses.replace(state, outer=self._added(state.outer, grads))
        if phase.forward:
            sent = self._stages.send(state.ahead, now, out)
            state = dataclasses.replace(state, ahead=sent)
        if phase.backward:
            returned = self._stages.travel.rolled(before, -1)
            returned = rings.put(state.returned, now, returned)
            state = dataclasses.replace(state, returned=returned)
        return state

    def grads(self, state: _State, inner: Params) -> Params:
        """All gradients, as the parameters are."""
        leaves, structure = jax.tree.flatten(inner)
        found: list[Any] = [None] * len(leaves)
        for run, grads in zip(self._stages.cut.runs, state.grads, strict=True):
            for at, grad in zip(run.leaves, jax.tree.leaves(grads), strict=True):
                found[self._leaf(at)] = grad.reshape(-1, *grad.shape[2:])
        return joined(jax.tree.unflatten(structure, found), state.outer)

    def _leaf(self, at: int | None) -> int:
        """Number among the leaves of the stack, of a leaf of the loss's arguments."""
        assert at is not None
        return at - self._skipped

    def _forward(self, state: _State, tick: Array, cells: Any, enters: Array | None) -> Any:
        out, ahead, kept = self._stages.forward(state.ahead, tick, cells, enters)
        kept = rings.put(state.kept, tick, kept)
        kept = self._laid_kept(kept)
        return out, dataclasses.replace(state, ahead=ahead, kept=kept)

    def _laid_kept(self, kept: Any) -> Any:
        return self._stages.travel.kept(kept, self._stages.layers.carries)

    def _loss(self, state: _State, tick: Array, out: Any, number: Array) -> _State:
        """The loss of the microbatch that has passed the last layer, and its gradients."""
        stages = self._stages
        last = stages.travel.of_stage(out, stages.count - 1)
        sums = stages.counted(state.ahead, self._ticks, number)

        def value(outer: Params, last: Any, sums: Any) -> Any:
            return stages.leave(outer, number, last, sums)

        differentiate = jax.value_and_grad(value, argnums=(0, 1, 2), has_aux=True)
        found, (grads, turned, dsums) = differentiate(stages.outer, last, sums)
        # Else the head's gradient would wait to be added until the layers have gone back.
        added_up = self._added(state.outer, grads), turned
        outer, turned = jax.lax.optimization_barrier(added_up)
        return dataclasses.replace(
            state,
            outer=outer,
            turned=rings.put(state.turned, tick, turned),
            dsums=rings.put(state.dsums, tick, dsums),
            sums=added(state.sums, found),
        )

    def _backward(self, state: _State, cells: Any, turns: Array) -> tuple[Any, _State]:
        """Gradients of the stages' inputs; those of parameters are added to what there is."""
        stages = self._stages
        at_last = (stages.numbers == stages.count - 1) & (cells["chunk"] == len(stages.rows) - 1)
        turned = jax.tree.map(lambda x: x[None], rings.slot(state.turned, turns))
        after = rings.chosen(at_last, turned, rings.slots(state.returned, cells["source"]))

        def one(ring: Any, rows: Any, grads: Any, after: Any, number: Any, *cell: Any) -> Any:
            forward, chunk, stage, active = cell
            by = after, self._dsums(state, number, chunk, stage)

            def kept(layer: Array) -> Any:
                held = rings.layer(ring, forward, layer)
                return stages.travel.kept_layer(held, stages.layers.carries)

            side = stages.side(number)
            return stages.layers.backward(rows, grads, by, side, kept, chunk, stage, active)

        names = ("microbatch", "forward", "chunk")
        cell = (*(cells[name] for name in names), stages.numbers, cells["active"])
        after = stages.travel.laid_out(after)
        given = (self._laid_kept(state.kept), stages.rows, state.grads, after, *cell)
        mapped = over_stages(one, in_axes=(1, *[0] * (len(given) - 1)))
        before, grads = mapped(*given)
        before = stages.travel.laid_out(before)
        return before, dataclasses.replace(state, grads=self._laid_out(grads))

    def _entered(self, before: Any, number: Array) -> Params:
        """Gradients of what stands before the layers, by the microbatch that is back there."""
        stages = self._stages
        start = stages.travel.of_stage(before, 0)
        start = jax.tree.map(lambda x: jnp.where(number >= 0, x, jnp.zeros_like(x)), start)
        _, pull = jax.vjp(lambda outer: stages.enter(outer, number), stages.outer)
        return pull(start)[0]

    def _dsums(self, state: _State, number: Array, chunk: Array, stage: Array) -> Any:
        """Of one stage: gradients by the sums of its chunk's layers."""
        if not jax.tree.leaves(state.dsums):
            return state.dsums[0]
        ended = jnp.asarray(self._ticks[:, -1, -1])[number]
        found, *others = rings.slot(state.dsums, ended)
        for at, more in enumerate(others, 1):
            found = jax.tree.map(lambda a, b, n=at: jnp.where(chunk == n, b, a), found, more)
        count = self._stages.layers.count
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, stage * count, count), found)

    def _added(self, so_far: Params, more: Params) -> Params:
        infos = self._outer_infos
        more = accumulable(self._bound, infos, more)
        return constrained(self._bound, infos, jax.tree.map(jnp.add, so_far, more))

    def _laid_out(self, grads: Any) -> Any:
        """Gradients of the stages' layers where the plan wants them."""
        return tuple(
            jax.tree.unflatten(
                jax.tree.structure(each),
                [
                    self._constrained(x, self._stack_infos[self._leaf(at)])
                    for x, at in zip(jax.tree.leaves(each), run.leaves, strict=True)
                ],
            )
            for run, each in zip(self._stages.cut.runs, grads, strict=True)
        )

    def _constrained(self, x: Array, info: ParamInfo) -> Array:
        spec = param_sharding(self._bound, "gradients", info).spec
        spec = PartitionSpec(_STAGE, None, *tuple(spec)[1:])
        return jax.lax.with_sharding_constraint(x, NamedSharding(self._bound.mesh, spec))
