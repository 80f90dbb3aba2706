"""A run's step, compiled for GPUs that are not there."""

from typing import Any

from colossax.aot import Program, Target, compile_program
from colossax.compat import cudnn_installed
from colossax.config import MeshAxis, Plan
from colossax.errors import InputError, PlanError
from colossax.offload import DEVICE_SHARE
from colossax.planner.counting.islands import island_devices
from colossax.planner.deciding.settling import Settled
from colossax.planner.deciding.trial import choosing_for
from colossax.planner.task_step import settle_task, task_step
from colossax.sharding import compiler_options
from colossax.step.step import Step
from colossax.tasks import Task, TrainConfig, task_of


def settle_for_target(config: TrainConfig, target: Target) -> tuple[TrainConfig, Settled]:
    """The run with its plan settled for a target, and how; see `settle`.

    Raises:
        InputError: A budget does not do, or the CUDA compiler plugin is missing.
    """
    settled = settle_task_for_target(task_of(config), config.plan, target)
    return config.replace(plan=settled.plan), settled


def settle_task_for_target(task: Task, plan: Plan, target: Target) -> Settled:
    """The plan of a task, settled for a target.

    Raises:
        InputError: The task does not say what its batches are; see `settle_for_target`.
    """
    check_shapes(task)
    check_cudnn(plan, target)
    with choosing_for(target):
        return settle_task(task, plan, island_devices(plan, target), target=target)


def compiled_step(config: TrainConfig, target: Target) -> tuple[Step, Program, Any]:
    """A run's step compiled for a target; see `compiled_task`."""
    return compiled_task(task_of(config), config.plan, target)


def compiled_task(task: Task, plan: Plan, target: Target) -> tuple[Step, Program, Any]:
    """A task's step, the program compiled for a target, and what was traced of it: a jaxpr.

    What the plan leaves open is settled for the target.

    Raises:
        InputError: See `settle_task_for_target`.
    """
    settled = settle_task_for_target(task, plan, target)
    if has_stage_programs(settled.plan, target):
        raise PlanError(
            "plan.pipeline.cuts: stages have programs of their own, and one for all of them is"
            " wanted here; leave the cuts out, or inspect the run (inspect_task)"
        )
    step, traced, lowered = lowered_task(task, settled, target)
    program = compile_program(lowered, options=compiler_options(step.bound), target=target)
    return step, program, traced.jaxpr


def lowered_task(task: Task, settled: Settled, target: Target) -> tuple[Step, Any, Any]:
    """A task's step, traced for a target and as the compiler would get it.

    Raises:
        PlanError: Model, batch or devices do not fit the plan.
    """
    with choosing_for(target):
        step = task_step(task, settled, island_devices(settled.plan, target))
        traced = step.jitted.trace(step.abstract, step.abstract_batch(task.shapes))
        return step, traced, traced.lower()


def has_stage_programs(plan: Plan, target: Target) -> bool:
    """Whether each stage of a plan has programs of its own on a target."""
    return plan.pipeline.cuts is not None and plan.mesh_sizes(target.size)[MeshAxis.STAGE] > 1


def check_shapes(task: Task) -> None:
    """Refuse a task that does not say what its batches are.

    Raises:
        InputError: It does not.
    """
    if not task.shapes:
        raise InputError(
            f"task '{task.name}': its shapes are empty, and a step is compiled for the shapes of a"
            " batch; give Task(shapes={name: jax.ShapeDtypeStruct(...)}) of a whole global batch"
        )


def check_cudnn(plan: Plan, target: Target) -> None:
    """Refuse a plan that asks for cuDNN where it is not installed; `auto` does without.

    Raises:
        InputError: It does.
    """
    if plan.attention.kernel == "cudnn" and not cudnn_installed():
        raise InputError(
            f"plan.attention.kernel 'cudnn' on '{target.name}': cuDNN is not installed here;"
            f" run: pip install 'colossax[cudnn]', or give --plan.attention.kernel xla"
        )


def usable_bytes(target: Target) -> float:
    """Of a GPU's memory, what a step may take."""
    return target.gpu.memory_bytes * DEVICE_SHARE
