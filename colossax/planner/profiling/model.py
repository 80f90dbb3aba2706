"""A task's model as the planner sees it: traced once, for one device, nothing compiled."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from colossax.aot import Target
from colossax.config import (
    AttentionConfig,
    BatchConfig,
    OffloadConfig,
    PipelineConfig,
    Plan,
    Segment,
)
from colossax.errors import PlanError
from colossax.layerwise import Marked, cut_marked, running
from colossax.planner.counting.traced_flops import traced_flops
from colossax.planner.deciding.trial import choosing_for
from colossax.planner.profiling.outside import kept_bytes_of
from colossax.planner.profiling.recorded import RecordedRun, Recorder
from colossax.planner.profiling.traced import TracedLayer, traced
from colossax.planner.task_step import task_step
from colossax.sharding import in_order, use
from colossax.step.gradients.accumulate import objective
from colossax.step.loss import SCALAR
from colossax.step.microbatches import Weighing, batch_dims
from colossax.step.offloaded.streaming import check_streamable
from colossax.step.stages import check_cut
from colossax.step.step import Step
from colossax.tasks import Task
from colossax.typing import ParamInfo


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerKind:
    """Layers of a stack that are alike.

    Attributes:
        calls: How often one is run in a pass.
        group: Layers of a call.
        tokens: That a call got: all numbers of its input but for those of one token.
        leaves: Of one call's parameters, their numbers among the model's.
        traced: What a call takes.
    """

    calls: int
    group: int
    tokens: int
    leaves: tuple[int, ...]
    traced: TracedLayer


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """What is known of a model before there is a mesh.

    Attributes:
        infos: Of each parameter.
        moments: Of each, bytes of optimizer state per number.
        learns: Of each, whether it gets a gradient.
        kinds: Of its layers, in order.
        tokens: That were traced: those of one row.
        rows: Of a global batch.
        ends_flops: Forward, for the tokens that were traced: of what stands outside of layers, with
            a part of what `prepare` computes once, so that all passes have the whole of it.
        ends_passes: How often those are done: 3 times, and where nothing of it learns twice.
        pair_flops: Likewise of attention between tokens.
        whole: Whether a global batch is one microbatch: the loss compares its rows with each other,
            or gives one number, of which it is not known what each microbatch counts.
        kept: Bytes that backward needs of a row, of a model that has no layers known here.
        staged: Whether stages might share the layers in one program.
        clips: Whether gradients wait until their norm is known.
        moves: Why layers' arrays cannot live in host memory; empty where they can.
    """

    infos: tuple[ParamInfo, ...]
    moments: tuple[float, ...]
    learns: tuple[bool, ...]
    kinds: tuple[LayerKind, ...]
    tokens: int
    rows: int
    ends_flops: float
    ends_passes: int
    pair_flops: float
    whole: bool = False
    kept: float = 0.0
    staged: bool = True
    clips: bool = False
    moves: str = ""

    @functools.cached_property
    def maps_flops(self) -> float:
        """Forward, of matmuls with parameters of layers."""
        return _maps_flops(self.kinds)

    @functools.cached_property
    def outside(self) -> tuple[int, ...]:
        """Numbers of parameters that are of no layer."""
        return _outside(self.kinds, len(self.infos))

    @functools.cached_property
    def width(self) -> int:
        """Numbers of a token that go from layer to layer."""
        return max((kind.traced.kept[0].shape[-1] for kind in self.kinds), default=0)

    @functools.cached_property
    def vocab(self) -> int:
        """Rows of the largest table; 0 without one."""
        tables = [info for info in self.infos if "vocab" in info.dims]
        return max((info.shape[info.dims.index("vocab")] for info in tables), default=0)


def profile_task(task: Task, plan: Plan, target: Target) -> ModelProfile:
    """Trace a task's model once, as one device of a target would compute one row.

    Args:
        task: What is trained.
        plan: Its precision and kernels count.
        target: Whose kernels are chosen.

    Raises:
        PlanError: Layers are those of several models.

    Cost: about a second for any size, one to three of a mixture; nothing is compiled or allocated.
    Of a task that does not say its FLOPs layers are traced once more, with attention written out.
    """
    dims = batch_dims(dict(task.shapes), task.options.batch_dims)
    one_row = _with_rows(task, dims, 1)
    with choosing_for(target):
        step, kinds, ends, before, whole, kept, staged = _traced_kinds(one_row, bare(plan))
        # Kernels do not say their FLOPs.
        pairs = sum((kind.calls * kind.traced.other_flops for kind in kinds), 0.0)
        learns = tuple(bool(learns) for learns in jax.tree.leaves(step.trainable))
        ends_passes = 2 + any(learns[at] for at in _outside(kinds, len(learns)))
        if task.flops:
            others = ends_passes * ends + _both_ways(kinds, learns)
            pairs = max(0.0, (task.flops / _rows(task, dims) - others) / 3)
        elif any(kind.traced.opaque for kind in kinds):
            written = bare(plan).replace(attention=AttentionConfig(kernel="reference"))
            _, anew, *_ = _traced_kinds(one_row, written)
            pairs = sum((kind.calls * kind.traced.other_flops for kind in anew), 0.0)
    infos = tuple(jax.tree.leaves(step.spec.infos))
    return ModelProfile(
        infos=infos,
        moments=tuple(_moments(step, infos)),
        learns=learns,
        kinds=kinds,
        tokens=_tokens(task, dims),
        rows=_rows(task, dims),
        ends_flops=ends + before / ends_passes,
        ends_passes=ends_passes,
        pair_flops=pairs,
        whole=whole,
        kept=kept,
        staged=staged,
        clips=step.options.clip_norm is not None and plan.offload.clipping == "stack",
        moves=_unmoved(step, task),
    )


def _unmoved(step: Step, task: Task) -> str:
    """Why layers' arrays cannot live in host memory; empty where they can."""
    try:
        check_streamable(step.bound, step.spec.infos, step.infos, task.optimizer)
    except PlanError as problem:
        return str(problem)
    return ""


def bare(plan: Plan) -> Plan:
    """On one device, nothing recomputed, placed elsewhere or in another layout than by default."""
    return plan.replace(
        mesh={"data": 1},
        tensor_layout="1d",
        tensor_matmul="auto",
        batch=BatchConfig(),
        pipeline=PipelineConfig(),
        segments=(Segment(),),
        offload=OffloadConfig(clipping=plan.offload.clipping, pipelined=plan.offload.pipelined),
    )


def _traced_kinds(
    task: Task, plan: Plan
) -> tuple[Step, tuple[LayerKind, ...], float, float, bool, float, bool]:
    """The step, kinds of layers, FLOPs of what stands outside of them, forward, and of what
    prepares a batch, whether a batch is one microbatch, what is kept of a row where there are no
    layers, and whether stages might share those that there are."""
    step = task_step(task, plan, jax.devices()[:1])
    call, terms = step.loss_call, set[str]()
    state, found = step.abstract, list[Any]()
    shapes = dict(step.options.shapes or {})
    jax.eval_shape(lambda batch: found.append(step.batches.in_order(batch)[1]), shapes)

    def loss(params: Any, variables: Any, batch: Any, key: Any) -> Any:
        given = call(params, batch, variables, key)
        terms.update(given[0])
        return objective(*given, Weighing())[0]

    states = state["params"], state["variables"]
    with use(step.bound), in_order(found[0]):
        shapes, before = _prepared(step, states, shapes)
        args = (*states, shapes, jax.eval_shape(lambda: jax.random.key(0)))
        recorder, program, marked = _recorded(loss, args)
        infos = jax.tree.leaves(step.spec.infos)
        kinds = tuple(_kind(run, infos) for run in recorder.runs)
        kept = 0.0 if kinds else _kept_of_a_row(task, step, loss, args)
        staged = False
        if marked is not None and len(kinds) == 1 and kinds[0].group == 1:
            staged = _shared(marked, kinds[0], len(infos))
    one_piece = call.whole_batch or SCALAR in terms
    scanned = [kinds[number] for number in recorder.scanned]
    layers = sum((kind.calls * kind.traced.counted_flops for kind in scanned), 0.0)
    ends = traced_flops(program).flops - layers
    return step, kinds, ends, before, one_piece, kept, staged


def _recorded(loss: Any, args: tuple[Any, ...]) -> tuple[Recorder, Any, Marked | None]:
    """What layers got, the traced loss, and that as equations, where runs are some of them.

    A loss may map, differentiate or repeat what calls layers: there all are run.
    """

    def traced_by(recorder: Recorder) -> tuple[Any, Any]:
        with running(recorder):
            return jax.make_jaxpr(loss, return_shape=True)(*args)

    recorder, marked = Recorder(), None
    try:
        program, out = traced_by(recorder)
        if recorder.calls:
            marked = recorder.found(program, out)
    except (NotImplementedError, PlanError):
        recorder = Recorder(scans=True)
        program, _ = traced_by(recorder)
    return recorder, program, marked


def _prepared(
    step: Step, states: tuple[Any, Any], shapes: Mapping[str, Any]
) -> tuple[dict[str, Any], float]:
    """What the loss gets of a batch of these shapes, and FLOPs of making that."""
    if step.options.prepare is None:
        return dict(shapes), 0.0
    program, prepared = jax.make_jaxpr(step.prepared, return_shape=True)(*states, dict(shapes))
    return prepared, float(traced_flops(program).flops)


def _shared(marked: Marked, kind: LayerKind, parameters: int) -> bool:
    """Whether a loss can be cut at its layers, as stages have to."""
    try:
        check_cut(cut_marked(*marked), kind.leaves, range(parameters))
    except PlanError:  # then one stage has them all
        return False
    return True


def _kept_of_a_row(task: Task, step: Step, loss: Any, args: tuple[Any, ...]) -> float:
    """Bytes that a second row adds to all that is kept; parameters are there anyway."""
    params, variables, _, key = args
    dims = batch_dims(dict(task.shapes), task.options.batch_dims)

    def needed(rows: int) -> float:
        batch, _ = _prepared(step, (params, variables), _with_rows(task, dims, rows).shapes)
        return kept_bytes_of(jax.make_jaxpr(loss)(params, variables, batch, key).jaxpr)

    return needed(2) - needed(1)


def _kind(run: RecordedRun, infos: Sequence[ParamInfo]) -> LayerKind:
    layer, layers = run.layer, run.layers
    leaves = tuple(at for at, info in enumerate(infos) if info.segment == layers.key)
    count = len(jax.tree.leaves(run.row))
    if len(leaves) != count:
        raise PlanError(
            f"plan: layer stack '{layers.key[0]}' reads {count} arrays and {len(leaves)} parameters"
            " are of its name, as of several models in one task, which are not searched yet; count"
            " plans of your own with colossax inspect"
        )
    outputs, carry = len(jax.tree.leaves(layer.out)), len(jax.tree.leaves(run.carry))
    return LayerKind(
        calls=layers.count,
        group=layers.group,
        tokens=math.prod(jax.tree.leaves(run.carry)[0].shape[:-1]),
        leaves=leaves,
        traced=traced(layer.equations, count, outputs, carry),
    )


def _outside(kinds: Sequence[LayerKind], count: int) -> tuple[int, ...]:
    inside = {at for kind in kinds for at in kind.leaves}
    return tuple(at for at in range(count) if at not in inside)


def _both_ways(kinds: Sequence[LayerKind], learns: Sequence[bool]) -> float:
    """Of maps forward and backward: what does not learn has no gradient of its own."""
    maps = [
        (kind.calls * one.flops, kind.leaves[one.leaf])
        for kind in kinds
        for one in kind.traced.maps
    ]
    return sum(((2 + learns[at]) * flops for flops, at in maps), 0.0)


def _maps_flops(kinds: Sequence[LayerKind]) -> float:
    return sum((kind.calls * one.flops for kind in kinds for one in kind.traced.maps), 0.0)


def _moments(step: Step, infos: Sequence[ParamInfo]) -> list[float]:
    found: dict[Any, float] = {}

    def of_moment(leaf: Any, info: Any) -> Any:
        if hasattr(leaf, "shape"):
            name = (info.path, info.segment)
            found[name] = found.get(name, 0.0) + math.prod(leaf.shape) * leaf.dtype.itemsize
        return leaf

    step.layout.map_moments(of_moment, lambda leaf: leaf)
    return [found.get((i.path, i.segment), 0.0) / max(1, math.prod(i.shape)) for i in infos]


def _rows(task: Task, dims: Mapping[str, Any]) -> int:
    name, first = next(iter(task.shapes.items()))
    return first.shape[dims[name].index("batch")]


def _tokens(task: Task, dims: Mapping[str, Any]) -> int:
    """Of a row: its longest sequence; 1 where there is none."""
    lengths = [
        shape.shape[dims[name].index("seq")]
        for name, shape in task.shapes.items()
        if "seq" in dims[name]
    ]
    return max(lengths, default=1)


def _with_rows(task: Task, dims: Mapping[str, Any], rows: int) -> Task:
    """The task with a global batch of so many rows."""

    def one(name: str, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        at = dims[name].index("batch")
        return jax.ShapeDtypeStruct((*x.shape[:at], rows, *x.shape[at + 1 :]), x.dtype)

    shapes = {name: one(name, x) for name, x in task.shapes.items()}
    return dataclasses.replace(task, shapes=shapes)
