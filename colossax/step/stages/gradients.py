"""Gradients of a loss whose layers the stages of a pipeline share, in one program for all."""

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
from colossax.layerwise import StageLayers, added, nothing, over_stages
from colossax.pipeline.routes import Phase, Routes, routes_of
from colossax.pipeline.table import Table
from colossax.sharding import batch_axes, param_sharding
from colossax.step.checks.float8 import check_met_once
from colossax.step.gradients.accumulate import LossCall, objective, summarised
from colossax.step.gradients.method import GradientMethod, Gradients
from colossax.step.gradients.sums import accumulable, as_arrays, constrained, noted, together
from colossax.step.microbatches import Microbatches
from colossax.step.stages import rings
from colossax.step.stages.forward import Ahead, Stages, by_stack, through, zeros
from colossax.step.stages.kept import Kept
from colossax.step.stages.order import to_their_stages
from colossax.step.stages.reduced import reduced_once
from colossax.step.trainable import chosen, joined, split
from colossax.typing import ParamInfo, Params

_STAGE = MeshAxis.STAGE.value


def pipelined(
    call: LossCall, bound: BoundPlan, infos: Any, trainable: Any, table_of: Callable[[int], Table]
) -> GradientMethod:
    """Microbatches on their way through the stages, as a table says; see docs/design/pipeline.md.

    Args:
        call: The loss.
        bound: Plan and devices, several of them along `stage`.
        infos: Of all parameters.
        trainable: Tree of booleans.
        table_of: Number of microbatches to a table.

    Raises:
        PlanError: The loss cannot be cut at one stack, or its layers not be shared; when traced.
    """

    learning_infos = chosen(infos, trainable)

    def gradients(params: Params, variables: Any, micro: Microbatches) -> Gradients:
        learning, frozen = split(params, trainable)

        def found(bound: BoundPlan, learning: Params, micro: Microbatches) -> tuple[Params, Any]:
            # What is frozen in the stack is handed to the stages with the rest of their layers.
            outer, beside = (by_stack(part, infos)[0] for part in (learning, frozen))
            inner = by_stack(joined(learning, frozen), infos)[1]

            def value(
                outer: Params, inner: Params, microbatch: Any, key: Any, weighing: Any
            ) -> Any:
                whole = joined(joined(outer, inner), beside)
                return objective(*call(whole, microbatch, variables, key), weighing)

            of_stack = by_stack(infos, infos)[1]
            stages = Stages(value, bound, of_stack, (outer, inner), micro, routes)
            learns = jax.tree.leaves(by_stack(trainable, infos)[1])
            way = _BothWays(stages, bound, by_stack(learning_infos, infos)[0], learns)
            state = through(routes, way.tick, way.start())
            return way.grads(state, inner), state.sums

        routes = routes_of(table_of(micro.count))
        if bound.plan.batch.reduce_once and batch_axes(bound) and micro.count > 1:
            grads, sums = reduced_once(bound, learning_infos, learning, micro, found)
        else:
            grads, sums = found(bound, learning, micro)
        grads = constrained(bound, learning_infos, grads)
        return summarised(learning_infos, grads, sums, micro)

    return gradients


@dataclasses.dataclass(frozen=True, kw_only=True)
class _State:
    """What goes from tick to tick.

    Attributes:
        ahead: On the way forward.
        kept: What forward keeps for backward, `[slots, stages, layers, ...]`.
        turned: Gradients of the loss by the last layer's output, `[slots, ...]`.
        dsums: By the sums of layers, of each run `[slots, layers, ...]`.
        returned: Gradients that were sent, of each way `[slots, stages, ...]`.
        pending: What input gradients leave for weight gradients, `[slots, stages, layers, ...]`.
        grads: Of the stages' layers, of each chunk `[stages, layers, ...]`; None of what is frozen,
            a `Maximum` of what is noted.
        outer: Of the other parameters.
        sums: Loss, terms and metrics.
    """

    ahead: Ahead
    kept: Any
    turned: Any
    dsums: Any
    returned: Any
    pending: Any
    grads: Any
    outer: Any
    sums: Any


jax.tree_util.register_dataclass(_State, [f.name for f in dataclasses.fields(_State)], [])


class _BothWays:
    """Forward and backward passes of all stages, a tick at a time."""

    def __init__(self, stages: Stages, bound: BoundPlan, infos: Any, learns: Sequence[bool]):
        self._stages, self._bound = stages, bound
        self._learns = learns
        self._routes: Routes = stages.routes
        self._outer_infos = infos
        self._skipped = len(jax.tree.leaves(stages.outer))
        self._infos = self._learning(stages.infos)
        self._ticks = self._routes.forward_ticks
        self._kept = Kept(stages, bound, self._kept_slots)
        both = stages.cut.before_reads & stages.cut.after_reads
        check_met_once(info for at, info in enumerate(jax.tree.leaves(infos)) if at in both)

    def start(self) -> _State:
        """Nothing has been done."""
        stages, routes = self._stages, self._routes
        dtype, lead = self._bound.plan.precision.accumulation, (stages.count,)
        carry = stages.travel.shapes
        ahead = stages.start()
        sums = jax.eval_shape(lambda: stages.counted(ahead, self._ticks, jnp.int32(0)))
        last = (jnp.int32(0), zeros(carry), zeros(sums))
        found = jax.eval_shape(lambda: stages.leave(stages.outer, *last))
        learning = self._learning(stages.rows), stages.outer
        wide = jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), learning)
        return _State(
            ahead=ahead,
            kept=self._kept.start(),
            turned=rings.empty(carry, routes.turning),
            dsums=rings.empty(sums, routes.kept),
            returned=stages.travel.rings(routes.returning, stages.count),
            pending=rings.empty(self._pending, routes.pending, lead=lead),
            grads=self._laid_out(noted(self._infos, wide[0])),
            outer=constrained(self._bound, self._outer_infos, wide[1]),
            sums=nothing(found),
        )

    def tick(self, phase: Phase, state: _State, xs: Any) -> _State:
        """The state after a tick."""
        now, ahead, back, late, plain = xs
        out = before = None
        if phase.forward:
            enters = plain["enters"] if phase.enters else None
            out, state = self._forward(state, now, ahead, enters)
        if phase.loss:
            state = self._loss(state, now, out, plain["ends"])
        if phase.backward:
            before, state = self._backward(state, now, back, plain["turns"])
        if phase.weight:
            state = self._weights(state, late)
        if phase.returns:
            grads = self._entered(before, plain["returns"])
            state = dataclasses.replace(state, outer=self._added(state.outer, grads))
        if phase.forward:
            sent = self._stages.send(state.ahead, now, out)
            state = dataclasses.replace(state, ahead=sent)
        if phase.backward:
            travel, ways = self._stages.travel, self._routes.ways
            sent = tuple(travel.rolled(before, -way) for way in ways)
            state = dataclasses.replace(state, returned=rings.put(state.returned, now, sent))
        return state

    def grads(self, state: _State, inner: Params) -> Params:
        """All gradients, as the parameters are."""
        leaves, structure = jax.tree.flatten(inner)
        found: list[Any] = [None] * len(leaves)
        for run, grads in zip(self._stages.cut.runs, self._as_planned(state.grads), strict=True):
            learning = filter(self._learns.__getitem__, map(self._leaf, run.leaves))
            for at, grad in zip(learning, jax.tree.leaves(grads), strict=True):
                found[at] = grad.reshape(-1, *grad.shape[2:])
        return joined(jax.tree.unflatten(structure, found), state.outer)

    def _leaf(self, at: int | None) -> int:
        """Number among the leaves of the stack, of a leaf of the loss's arguments."""
        assert at is not None
        return at - self._skipped

    def _learning(self, trees: Sequence[Any]) -> tuple[Any, ...]:
        """Of trees like the runs' parameters: None in place of what does not learn."""
        found = []
        for run, tree in zip(self._stages.cut.runs, trees, strict=True):
            leaves, structure = jax.tree.flatten(tree)
            pairs = zip(map(self._leaf, run.leaves), leaves, strict=True)
            kept = [leaf if self._learns[at] else None for at, leaf in pairs]
            found.append(jax.tree.unflatten(structure, kept))
        return tuple(found)

    def _forward(self, state: _State, tick: Array, cells: Any, enters: Array | None) -> Any:
        out, ahead, kept = self._stages.forward(state.ahead, tick, cells, enters)
        kept = self._kept.put(state.kept, tick, kept)
        return out, dataclasses.replace(state, ahead=ahead, kept=kept)

    def _loss(self, state: _State, tick: Array, out: Any, number: Array) -> _State:
        """The loss of the microbatch that has passed the last layer, and its gradients."""
        stages = self._stages
        last = stages.travel.of_stage(out, self._routes.last)
        sums = stages.counted(state.ahead, self._ticks, number)

        def value(outer: Params, last: Any, sums: Any) -> Any:
            return stages.leave(outer, number, last, sums)

        # Else the head would be gathered, and wait, while the layers go forward; and what these
        # keep would wait for its slot while the loss is computed.
        before = (stages.outer, last, state.kept)
        outer, last, kept = jax.lax.optimization_barrier(before)
        differentiate = jax.value_and_grad(value, argnums=(0, 1, 2), has_aux=True)
        found, (grads, turned, dsums) = differentiate(outer, last, sums)
        # Else the head's gradient would wait to be added until the layers have gone back.
        added_up = self._added(state.outer, grads), turned
        outer, turned = jax.lax.optimization_barrier(added_up)
        return dataclasses.replace(
            state,
            outer=outer,
            kept=kept,
            turned=rings.put(state.turned, tick, turned),
            dsums=rings.put(state.dsums, tick, dsums),
            sums=added(state.sums, found),
        )

    def _backward(self, state: _State, tick: Array, cells: Any, turns: Array) -> tuple[Any, _State]:
        """Gradients of the stages' inputs; those of parameters are added to what there is."""
        stages = self._stages
        at_last = (stages.numbers == self._routes.last) & (cells["chunk"] == len(stages.rows) - 1)
        turned = jax.tree.map(lambda x: x[None], rings.slot(state.turned, turns))
        after = rings.chosen(at_last, turned, rings.sent(state.returned, cells))
        after = stages.travel.laid_out(after)
        if self._routes.pending:
            before, state = self._inputs(state, tick, after, cells)
        else:
            find = self._fetching if stages.layers.fetches else self._by_layer
            before, grads = find(state, after, cells)
            state = dataclasses.replace(state, grads=self._laid_out(grads))
        return stages.travel.laid_out(before), state

    def _by_layer(self, state: _State, after: Any, cells: Any) -> tuple[Any, Any]:
        """By the stages' inputs, and the sums of gradients; what is kept is read by layer."""
        stages, kept = self._stages, self._kept

        def one(here: Any, fetched: Any, forward: Array, *given: Any) -> Any:
            rows, grads, after, number, *cell = given
            by = after, self._dsums(state, number, *cell[:2])
            layer = functools.partial(kept.layer, here, fetched, forward)
            return stages.layers.backward(rows, grads, by, stages.side(number), layer, *cell)

        forward = cells["forward"]
        here, fetched = kept.readable(kept.laid_out(state.kept), forward)
        given = (fetched, forward, stages.rows, state.grads, after, *self._cell(cells))
        return over_stages(one, in_axes=(1, *[0] * len(given)))(here, *given)

    def _fetching(self, state: _State, after: Any, cells: Any) -> tuple[Any, Any]:
        """Likewise, where layers are fetched from host memory."""
        stages = self._stages
        kept = self._kept.of(self._kept.laid_out(state.kept), cells["forward"])
        number, *cell = self._cell(cells)
        by = after, over_stages(functools.partial(self._dsums, state))(number, *cell[:2])
        given = by, over_stages(stages.side)(number), kept
        return stages.layers.backward_fetching(stages.rows, state.grads, *given, *cell)

    def _inputs(self, state: _State, tick: Array, after: Any, cells: Any) -> tuple[Any, _State]:
        """By the stages' inputs; what gradients of their weights wait for is put into its ring."""
        stages, ring = self._stages, self._kept.laid_out(state.kept)
        kept = self._kept.of(ring, cells["forward"])
        if any(len(block.phases) > 1 for block in self._routes.blocks):
            # Read before the next phase writes: else the compiler copies the whole ring.
            kept, ring = jax.lax.optimization_barrier((kept, ring))
            state = dataclasses.replace(state, kept=ring)

        def one(rows: Any, after: Any, kept: Any, number: Any, *cell: Any) -> Any:
            by = after, self._dsums(state, number, *cell[:2])
            return self._alike.input_gradients(rows, by, stages.side(number), kept, *cell)

        before, found = over_stages(one)(stages.rows, after, kept, *self._cell(cells))
        pending = rings.put(state.pending, tick, found)
        return before, dataclasses.replace(state, pending=pending)

    def _weights(self, state: _State, cells: Any) -> _State:
        """Gradients of the stages' weights added to what there is."""
        stages, kept = self._stages, None
        pending = rings.slots(state.pending, cells["source"])
        if self._alike.apart.reads_kept:
            kept = self._kept.of(self._kept.laid_out(state.kept), cells["forward"])

        def one(rows: Any, grads: Any, kept: Any, pending: Any, number: Any, *cell: Any) -> Any:
            given = stages.side(number), kept, pending
            return self._alike.weight_gradients(rows, grads, *given, *cell)

        inputs = (stages.rows, state.grads, kept, pending, *self._cell(cells))
        return dataclasses.replace(state, grads=self._laid_out(over_stages(one)(*inputs)))

    def _cell(self, cells: Any) -> tuple[Array, ...]:
        """Of each stage: microbatch, chunk, its part of it, and whether there is anything."""
        chunk = cells["chunk"]
        return cells["microbatch"], chunk, self._stages.parts(chunk), cells["active"]

    @property
    def _alike(self) -> StageLayers:
        """The layers, all of one policy: of others backward has one part."""
        assert isinstance(self._stages.layers, StageLayers)
        return self._stages.layers

    @property
    def _kept_slots(self) -> int:
        reads = bool(self._routes.pending) and self._alike.apart.reads_kept
        return self._routes.held if reads else self._routes.kept

    @property
    def _pending(self) -> list[jax.ShapeDtypeStruct]:
        return self._alike.pending if self._routes.pending else []

    def _entered(self, before: Any, number: Array) -> Params:
        """Gradients of what stands before the layers, by the microbatch that is back there."""
        stages = self._stages
        start = stages.travel.of_stage(before, self._routes.first)
        start = jax.tree.map(lambda x: jnp.where(number >= 0, x, jnp.zeros_like(x)), start)
        _, pull = jax.vjp(lambda outer: stages.enter(outer, number), stages.outer)
        return pull(start)[0]

    def _dsums(self, state: _State, number: Array, chunk: Array, part: Array) -> Any:
        """Of one stage: gradients by the sums of its chunk's layers."""
        if not jax.tree.leaves(state.dsums):
            return state.dsums[0]
        ended = jnp.asarray(self._ticks[:, -1, self._routes.last])[number]
        found, *others = rings.slot(state.dsums, ended)
        for at, more in enumerate(others, 1):
            found = jax.tree.map(lambda a, b, n=at: jnp.where(chunk == n, b, a), found, more)
        count = self._stages.layers.count
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, part * count, count), found)

    def _added(self, so_far: Params, more: Params) -> Params:
        infos = self._outer_infos
        more = accumulable(self._bound, infos, more)
        return constrained(self._bound, infos, together(infos, so_far, more))

    def _as_planned(self, grads: Any) -> Any:
        """Gradients of the stages' layers where the plan has the layers."""
        back = np.argsort(self._routes.order, axis=1)
        grads = as_arrays(self._infos, grads)
        return to_their_stages(self._bound, "gradients", grads, self._infos, back)

    def _laid_out(self, grads: Any) -> Any:
        """Gradients of the stages' layers where the plan wants them."""
        grads = jax.tree.map(self._constrained, as_arrays(self._infos, grads), self._infos)
        return noted(self._infos, grads)

    def _constrained(self, x: Array, info: ParamInfo) -> Array:
        spec = param_sharding(self._bound, "gradients", info).spec
        spec = PartitionSpec(_STAGE, None, *tuple(spec)[1:])
        return jax.lax.with_sharding_constraint(x, NamedSharding(self._bound.mesh, spec))
