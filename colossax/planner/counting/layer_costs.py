"""What each layer of a model takes as part of a stage: FLOPs and bytes, counted, nothing run."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from colossax.config import OffloadConfig
from colossax.layerwise import CutRun, Layer, Scanned, cut_loss, kept_sharding, shapes_of
from colossax.pipeline.cuts import LayerCost
from colossax.planner.counting.one_layer import layer_flops, row_shapes, traced_layer
from colossax.sharding import in_order, param_sharding, use
from colossax.step.gradients.accumulate import objective
from colossax.step.microbatches import Weighing
from colossax.step.state import state_sharding
from colossax.step.step import Step


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackCosts:
    """Layers of a stack, and what stands before and behind them, as one stage's devices have them.

    Attributes:
        layers: In the order of the model; `seconds` hold FLOPs of all devices of the stage, forward
            and backward of a microbatch, recomputation included. Bytes are of one device.
        first: What comes before the first layer, such as an embedding.
        last: What comes after the last, such as a head and the loss.
        working_bytes: Of a device, for what one layer makes while it is computed.
    """

    layers: tuple[LayerCost, ...]
    first: LayerCost
    last: LayerCost
    working_bytes: float

    def at(self, flops_per_s: float) -> "StackCosts":
        """With seconds in place of FLOPs."""

        def one(cost: LayerCost) -> LayerCost:
            return dataclasses.replace(cost, seconds=cost.seconds / flops_per_s)

        layers = tuple(map(one, self.layers))
        return dataclasses.replace(self, layers=layers, first=one(self.first), last=one(self.last))


def stack_costs(
    step: Step, counted: Step, offload: OffloadConfig, *, sums: bool = True
) -> StackCosts:
    """Of a step that would do the whole model on one stage's devices, a microbatch at once.

    Layers of a group that repeats count alike. Where nothing multiplies, layers take one each, and
    the rest nothing.

    Args:
        step: Its bytes count.
        counted: The same with attention written out, as kernels do not say their FLOPs.
        offload: Shares that are not on the devices.
        sums: Whether gradients of several microbatches are added up: each then has its own beside
            the sum.

    Raises:
        PlanError: The loss cannot be cut at one layer stack.

    Cost: loss, layers of each kind and what stands beside them are traced, twice where the two
    steps differ. Nothing is compiled.
    """
    own = _Traced(step)
    flops = own if counted is step else _Traced(counted)
    state = _state_bytes(step, offload, 2 if sums else 1)
    kept = 1 - offload.activations
    layers = [cost for at in range(len(own.runs)) for cost in own.costs(at, state, kept, flops)]
    first, last = own.ends(state, flops)
    if not any(layer.seconds for layer in layers):
        layers = [dataclasses.replace(layer, seconds=1.0) for layer in layers]
    return StackCosts(
        layers=tuple(layers),
        first=first,
        last=last,
        working_bytes=max(own.working_bytes(run) for run in own.runs),
    )


@dataclasses.dataclass(frozen=True)
class _StateBytes:
    """Of a parameter, on a device: at rest with its gradients, and its optimizer state."""

    read: float
    moments: float


def _state_bytes(step: Step, offload: OffloadConfig, gradients: int) -> list[_StateBytes]:
    """Of each parameter, with so many gradients."""
    moments: dict[Any, float] = {}

    def of_moment(leaf: Any, info: Any) -> Any:
        if hasattr(leaf, "shape"):
            sharding = state_sharding(step.bound, info, leaf.shape)
            size = math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            name = (info.path, info.segment)
            moments[name] = moments.get(name, 0.0) + size
        return leaf

    step.layout.map_moments(of_moment, lambda leaf: leaf)
    precision, found = step.bound.plan.precision, []
    infos = jax.tree.leaves(step.spec.infos)
    for info, learns in zip(infos, jax.tree.leaves(step.trainable), strict=True):
        inside = info.total_layers is not None
        size = math.prod(info.shape)
        at_rest = _part(step, "params", info) * size * info.at_rest(precision.params).itemsize
        adds = learns and jax.numpy.dtype(precision.accumulation).itemsize
        gradient = gradients * _part(step, "gradients", info) * size * adds
        read = at_rest * (1 - inside * offload.parameters) + gradient
        own = moments.get((info.path, info.segment), 0.0)
        found.append(_StateBytes(read, own * (1 - inside * offload.optimizer)))
    return found


def _part(step: Step, role: str, info: Any) -> float:
    """Of a parameter, what one device has."""
    sharding = param_sharding(step.bound, role, info)
    return math.prod(sharding.shard_shape(info.shape)) / max(1, math.prod(info.shape))


class _Traced:
    """The loss of a step, cut at its stack.

    Attributes:
        runs: Of the stack.
    """

    def __init__(self, step: Step):
        self._step, shapes = step, dict(step.options.shapes or {})
        state = step.abstract
        given = (state["params"], state["variables"], shapes, jax.eval_shape(_key))
        found: list[Any] = []
        jax.eval_shape(lambda batch: found.append(step.batches.in_order(batch)[1]), shapes)
        self._args, self._order = shapes_of(given), found[0]
        with self._in_force():
            self._cut = cut_loss(self._loss, *self._args)
            self._carry, self._side, self._crossing = jax.eval_shape(self._cut.before, *self._args)
        self.runs: tuple[CutRun, ...] = self._cut.runs

    @contextmanager
    def _in_force(self) -> Iterator[None]:
        with use(self._step.bound), in_order(self._order):
            yield

    def _loss(self, params: Any, variables: Any, batch: Any, key: Any) -> Any:
        return objective(*self._step.loss_call(params, batch, variables, key), Weighing())[0]

    def costs(
        self, at: int, state: Sequence[_StateBytes], kept: float, flops: "_Traced"
    ) -> list[LayerCost]:
        """Of each layer of a run."""
        run = self.runs[at]
        each, group = run.layers.count * run.layers.group, run.layers.group
        own = [state[leaf] for leaf in run.reads if leaf < len(state)]
        with self._in_force():
            layer = traced_layer(run, self._row(run), self._carry, self._side)
            cost = LayerCost(
                seconds=flops.run_flops(flops.runs[at]) / group,
                state_bytes=sum(one.read + one.moments for one in own) / each,
                kept_bytes=kept * _bytes(layer.kept) / group,
                out_bytes=_bytes(jax.tree.leaves(self._carry)),
            )
        return [cost] * each

    def run_flops(self, run: CutRun) -> float:
        """Of one call of a run, forward and backward."""
        row = self._row(run)
        with self._in_force():
            layer = traced_layer(run, row, self._carry, self._side)
            return layer_flops(layer, row, self._carry, self._side)

    def working_bytes(self, run: CutRun) -> float:
        """What a run's layer makes that its transpose needs, were nothing of it recomputed."""
        with self._in_force():
            args = (self._row(run), self._carry, self._side)
            return _bytes(traced_layer(run, *args, recomputed=False).kept)

    def ends(self, state: Sequence[_StateBytes], flops: "_Traced") -> tuple[LayerCost, LayerCost]:
        """What stands before the layers, and what behind."""
        inside = frozenset[int]().union(*(run.reads for run in self.runs))
        infos = list(enumerate(jax.tree.leaves(self._step.spec.infos)))
        outside = [(at, info.behind) for at, info in infos if at not in inside]
        reads = (self._cut.before_reads, self._cut.after_reads)
        counted, found = flops._ends(), []
        for behind, (layer, *_) in enumerate(self._ends()):
            # What is at home on the other end is sent here once a step, and its gradient back.
            own = sum(state[at].read + state[at].moments for at, end in outside if end == behind)
            sent = sum(state[at].read for at, e in outside if e != behind and at in reads[behind])
            with flops._in_force():
                seconds = layer_flops(*counted[behind])
            with self._in_force():
                kept = _bytes(layer.kept)
            found.append(LayerCost(seconds=seconds, state_bytes=own + sent, kept_bytes=kept))
        return found[0], found[1]

    def _ends(self) -> list[tuple[Layer, Any, Any, Any]]:
        """What stands before and behind the layers as layers, with parameters, carry and side."""
        params, *others = self._args

        def enter(params: Any, carry: Any, others: Any, number: Any) -> Any:
            return self._cut.enter(params, *others), {}

        def after(read: Any, outputs: Any, others: Any, number: Any) -> Any:
            return self._cut.after((read[0], *others), outputs, read[1]), {}

        with self._in_force():
            outputs = [self._output(run) for run in self.runs]
            read = (params, self._crossing)
            before = Layer(enter, params, (), others)
            behind = Layer(after, read, outputs, others)
            return [(before, params, (), others), (behind, read, outputs, others)]

    def _output(self, run: CutRun) -> Any:
        """Shapes of what a run gives."""

        def call(rows: Any, carry: Any, side: Any) -> Any:
            carry, _, _, sums = Scanned().run(run.layers, rows, carry, side, None, None)
            return carry, sums

        rows = jax.eval_shape(run.params, *self._args)
        return shapes_of(jax.eval_shape(call, rows, self._carry, self._side))

    def _row(self, run: CutRun) -> Any:
        """Shapes of the parameters of one call."""
        with self._in_force():
            return row_shapes(run, self._args)


def _key() -> Any:
    return jax.random.key(0)


def _bytes(arrays: Sequence[Any]) -> float:
    """Of a device's part, kept as layers' activations are."""
    total = 0
    for x in arrays:
        sharding = kept_sharding(x)
        shape = x.shape if sharding is None else sharding.shard_shape(x.shape)
        total += math.prod(shape) * x.dtype.itemsize
    return float(total)
