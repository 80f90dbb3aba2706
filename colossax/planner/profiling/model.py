"""A task's model as the planner sees it: traced once, for one device, nothing compiled."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from colossax.aot import Target
from colossax.config import BatchConfig, OffloadConfig, PipelineConfig, Plan, Segment
from colossax.layerwise import CutRun
from colossax.planner.counting.layer_costs import CutStep
from colossax.planner.counting.one_layer import traced_layer
from colossax.planner.deciding.trial import choosing_for
from colossax.planner.profiling.traced import TracedLayer, traced
from colossax.planner.task_step import task_step
from colossax.step.microbatches import batch_dims
from colossax.step.step import Step
from colossax.tasks import Task
from colossax.typing import ParamInfo


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerKind:
    """Layers of a stack that are alike.

    Attributes:
        calls: How often one is run in a pass.
        leaves: Of one call's parameters, their numbers among the model's.
        traced: What a call takes.
    """

    calls: int
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
        behind: Numbers of parameters that are read behind the layers, such as a head's.
        before: Of those that are read before them.
        tokens: That were traced: those of one row.
        rows: Of a global batch.
        flops: Of the model, forward, for the tokens that were traced.
    """

    infos: tuple[ParamInfo, ...]
    moments: tuple[float, ...]
    learns: tuple[bool, ...]
    kinds: tuple[LayerKind, ...]
    behind: frozenset[int]
    before: frozenset[int]
    tokens: int
    rows: int
    flops: float

    @functools.cached_property
    def maps_flops(self) -> float:
        """Forward, of matmuls with parameters of layers."""
        return sum(kind.calls * sum(m.flops for m in kind.traced.maps) for kind in self.kinds)

    @functools.cached_property
    def ends_flops(self) -> float:
        """Forward, of matrices that are read outside of layers and are more than looked up."""
        return sum(2.0 * self.tokens * self._numbers(at) for at in self.ends)

    @functools.cached_property
    def ends(self) -> tuple[int, ...]:
        """Parameters outside of layers that all tokens are multiplied by."""
        found = set(self.behind)
        found |= {at for at in self.before if not self.infos[at].dims[0] == "vocab"}
        return tuple(sorted(at for at in found if len(self.infos[at].shape) > 1))

    @functools.cached_property
    def pair_flops(self) -> float:
        """Forward, of what is left: attention between tokens."""
        return max(0.0, self.flops - self.maps_flops - self.ends_flops)

    @functools.cached_property
    def width(self) -> int:
        """Numbers of a token that go from layer to layer."""
        return max((kind.traced.kept[0].shape[-1] for kind in self.kinds), default=0)

    @functools.cached_property
    def vocab(self) -> int:
        """Rows of the largest table; 0 without one."""
        tables = [info for info in self.infos if "vocab" in info.dims]
        return max((info.shape[info.dims.index("vocab")] for info in tables), default=0)

    def _numbers(self, at: int) -> int:
        return math.prod(self.infos[at].shape)


def profile_task(task: Task, plan: Plan, target: Target) -> ModelProfile:
    """Trace a task's model once, as one device of a target would compute one row.

    Args:
        task: What is trained.
        plan: Its precision and kernels count.
        target: Whose kernels are chosen.

    Raises:
        PlanError: The loss cannot be cut at one layer stack.

    Cost: about a second for any size; nothing is compiled or allocated.
    """
    single = plan.replace(
        mesh={"data": 1},
        tensor_layout="1d",
        tensor_matmul="auto",
        batch=BatchConfig(),
        pipeline=PipelineConfig(),
        segments=(Segment(),),
        offload=OffloadConfig(),
    )
    dims = batch_dims(dict(task.shapes), task.options.batch_dims)
    rows = _rows(task, dims)
    with choosing_for(target):
        step = task_step(_one_row(task, dims), single, jax.devices()[:1])
        cut = CutStep(step)
        kinds = tuple(_kind(cut, run) for run in cut.runs)
    infos = tuple(jax.tree.leaves(step.spec.infos))
    flops = task.flops / 3 / rows if task.flops else 0.0
    return ModelProfile(
        infos=infos,
        moments=tuple(_moments(step, infos)),
        learns=tuple(bool(learns) for learns in jax.tree.leaves(step.trainable)),
        kinds=kinds,
        behind=frozenset(at for at in cut.reads[1] if at < len(infos)),
        before=frozenset(at for at in cut.reads[0] if at < len(infos)),
        tokens=_tokens(task, dims),
        rows=rows,
        flops=flops,
    )


def _kind(cut: CutStep, run: CutRun) -> LayerKind:
    with cut.in_force():
        row = cut.row(run)
        layer = traced_layer(run, row, cut.carry, cut.side, recomputed=False)
    parameters = len(jax.tree.leaves(row))
    return LayerKind(
        calls=run.layers.count,
        leaves=tuple(-1 if at is None else at for at in run.leaves),
        traced=traced(
            layer.equations,
            parameters,
            len(jax.tree.leaves(layer.out)),
            len(jax.tree.leaves(cut.carry)),
        ),
    )


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


def _one_row(task: Task, dims: Mapping[str, Any]) -> Task:
    """The task with a global batch of one row."""

    def one(name: str, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        at = dims[name].index("batch")
        return jax.ShapeDtypeStruct((*x.shape[:at], 1, *x.shape[at + 1 :]), x.dtype)

    shapes = {name: one(name, x) for name, x in task.shapes.items()}
    return dataclasses.replace(task, shapes=shapes)
