"""What a layer takes on each device here, and what handing its output to the next one takes."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from colossax.config import AttentionConfig, Plan, Segment
from colossax.errors import InputError
from colossax.layerwise import CutRun, cut_loss
from colossax.pallas.bench import Effort, time_calls
from colossax.planner.counting.one_layer import both_ways, layer_flops, row_shapes, traced_layer
from colossax.planner.task_step import task_step
from colossax.sharding import use
from colossax.step.microbatches import batch_dims
from colossax.tasks import Task
from colossax.typing import Batch

Shapes = dict[str, jax.ShapeDtypeStruct]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerMeasure:
    """Of one layer: what ran, and seconds of each repeat by device.

    Attributes:
        layer: For people, and to tell whether two measures are of the same.
        seconds: `[device][repeat]`, forward and backward of a microbatch; of a stack whose layers
            differ, the mean layer.
        flops: What that layer multiplies, attention written out, as `stack_costs` counts it.
    """

    layer: str
    seconds: list[list[float]]
    flops: float


def measure_layer(
    task: Task, plan: Plan, devices: Sequence[jax.Device], effort: Effort
) -> LayerMeasure:
    """Time a layer's forward and backward pass, recomputation included, on each device by turns.

    Each device computes a whole layer for the rows that the plan gives a device at a time, one
    where it does not say. Parameters and activations are made up.

    Args:
        task: Whose loss calls one layer stack.
        plan: Its precision, attention's kernel, first remat policy and microbatch count.
        devices: Of this process.
        effort: How long.

    Raises:
        PlanError: The loss cannot be cut at a layer stack.

    Cost: the loss is traced for each kind of device, a layer compiled for each device, which holds
    one layer.
    """
    plan = _plain(plan)
    shapes = _microbatch(task, plan)
    kinds = {device.device_kind: device for device in devices}
    cut = {kind: _CutTask(task, plan, shapes, device) for kind, device in kinds.items()}
    totals = [[0.0] * effort.repeats for _ in devices]
    runs = cut[devices[0].device_kind].runs
    for number, run in enumerate(runs):
        calls = {kind: one.call(number) for kind, one in cut.items()}
        on_each = {str(at): calls[d.device_kind](d) for at, d in enumerate(devices)}
        times = time_calls(on_each, [()], effort)
        for total, seconds in zip(totals, times.values(), strict=True):
            total[:] = [a + run.layers.count * s for a, s in zip(total, seconds, strict=True)]
    count = sum(run.layers.count * run.layers.group for run in runs)
    name, x = max(shapes.items(), key=lambda item: (item[1].size, item[0] == "tokens"))
    return LayerMeasure(
        layer=(
            f"{name} {' x '.join(map(str, x.shape))}, {plan.precision.compute},"
            f" remat {plan.segments[0].remat}"
        ),
        seconds=[[seconds / count for seconds in total] for total in totals],
        flops=_counted(task, plan, shapes, devices[0]) / count,
    )


def _counted(task: Task, plan: Plan, shapes: Shapes, device: jax.Device) -> float:
    """FLOPs of all layers."""
    plain = plan.replace(attention=AttentionConfig(kernel="xla"))
    cut = _CutTask(task, plain, shapes, device)
    return sum(run.layers.count * cut.flops(number) for number, run in enumerate(cut.runs))


def activation(task: Task, plan: Plan, device: jax.Device) -> Any:
    """Shapes of what a layer hands to the next, for the rows that a device has at a time.

    Raises:
        PlanError: See `measure_layer`.
    """
    plan = _plain(plan)
    return _CutTask(task, plan, _microbatch(task, plan), device).carry


def measure_links(
    sent: Any, devices: Sequence[jax.Device], effort: Effort
) -> dict[tuple[int, int], list[float]]:
    """Seconds in which arrays go from each device to the next, by their numbers; by turns.

    Args:
        sent: Shapes of the arrays.
        devices: Of this process, in the order of stages.
        effort: How long.

    Raises:
        InputError: There is one device.
    """
    if len(devices) < 2:
        raise InputError(
            f"devices: there is {len(devices)}, and a link lies between two; run it where there are"
            " more, or on a CPU with --devices 2"
        )
    calls = {}
    for number, (one, other) in enumerate(zip(devices, devices[1:], strict=False)):
        here, there = SingleDeviceSharding(one), SingleDeviceSharding(other)
        arrays = jax.device_put(jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), sent), here)
        calls[str(number)] = functools.partial(jax.device_put, arrays, there)
    times = time_calls(calls, [()], effort)
    return {(int(number), int(number) + 1): seconds for number, seconds in times.items()}


def _plain(plan: Plan) -> Plan:
    """As a device computes its part of a layer by itself, with all it needs at hand."""
    return Plan(
        segments=(Segment(remat=plan.segments[0].remat),),
        precision=plan.precision,
        attention=AttentionConfig(kernel=plan.attention.kernel),
        batch=dataclasses.replace(plan.batch, accumulation=1, reduce_once=False),
    )


def _microbatch(task: Task, plan: Plan) -> Shapes:
    """The batch's shapes with the rows that a device has at a time."""
    if not task.shapes:
        raise InputError(
            f"task '{task.name}': its shapes are empty, and a layer is measured on those of a"
            " batch; give Task(shapes={name: jax.ShapeDtypeStruct(...)}) of a whole global batch"
        )
    rows = plan.batch.microbatch or 1
    dims = batch_dims(dict(task.shapes), task.options.batch_dims)
    return {
        name: jax.ShapeDtypeStruct(
            tuple(
                rows if dim == "batch" else n for dim, n in zip(dims[name], x.shape, strict=True)
            ),
            x.dtype,
        )
        for name, x in task.shapes.items()
    }


class _CutTask:
    """The loss of a task cut at its stack, on one device.

    Attributes:
        runs: Of the stack.
        carry: Shapes of a layer's input.
    """

    def __init__(self, task: Task, plan: Plan, shapes: Shapes, device: jax.Device):
        plain = dataclasses.replace(task, shapes=shapes)
        self.step = task_step(plain, plan, [device])
        self.shapes, self._device = shapes, device
        with use(self.step.bound):
            self._cut = cut_loss(self._loss, *self._abstract)
            self.carry, self._side, _ = jax.eval_shape(self._cut.before, *self._abstract)
        self.runs: tuple[CutRun, ...] = self._cut.runs

    @property
    def _abstract(self) -> tuple[Any, ...]:
        state = self.step.abstract
        given = (state["params"], state["variables"], self.shapes)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)

    def _loss(self, params: Any, variables: Any, batch: Batch) -> Any:
        batch = self.step.prepared(params, variables, batch)
        return self.step.loss_call(params, batch, variables, jax.random.key(0))

    def call(self, number: int) -> Callable[[jax.Device], Callable[[], Any]]:
        """A run's layer, forward and backward on inputs made up, on a device of this kind."""
        run = self.runs[number]
        with use(self.step.bound), jax.default_device(self._device):
            row = row_shapes(run, self._abstract)
            layer = traced_layer(run, row, self.carry, self._side)
            inputs = jax.jit(lambda: (_made((row, self.carry)), self._sides()))()
        program = jax.jit(functools.partial(both_ways, layer, run.layers.origin))

        def on(device: jax.Device) -> Callable[[], Any]:
            return functools.partial(program, *jax.device_put(inputs, device))

        return on

    def flops(self, number: int) -> float:
        """Of one call of a run, forward and backward."""
        run = self.runs[number]
        with use(self.step.bound):
            row = row_shapes(run, self._abstract)
            layer = traced_layer(run, row, self.carry, self._side)
            return layer_flops(layer, row, self.carry, self._side)

    def _sides(self) -> Any:
        """Side inputs, which are made of the batch; parameters that they need not cost nothing."""
        params, variables, _ = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self._abstract)
        return self._cut.before(params, variables, _batch(self.shapes))[1]


def _made(shapes: Any) -> Any:
    """Numbers of either sign that leave products finite; integers are 0."""
    return jax.tree.map(
        lambda x: (
            (0.02 * jnp.sin(jnp.arange(x.size, dtype=jnp.float32))).astype(x.dtype).reshape(x.shape)
            if jnp.issubdtype(x.dtype, jnp.floating)
            else jnp.zeros(x.shape, x.dtype)
        ),
        shapes,
    )


def _batch(shapes: Shapes) -> Batch:
    """One document in each row: positions count, all else is 0."""
    made = {name: jnp.zeros(x.shape, x.dtype) for name, x in shapes.items()}
    if "positions" in made:
        x = made["positions"]
        made["positions"] = jnp.broadcast_to(jnp.arange(x.shape[-1], dtype=x.dtype), x.shape)
    return made
