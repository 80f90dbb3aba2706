"""A run's step, compiled for GPUs that are not there."""

from typing import Any

from colossax.aot import (
    Program,
    Target,
    checkpoint_stacks,
    compile_program,
    target_devices,
)
from colossax.compat import cudnn_installed
from colossax.config import Plan
from colossax.errors import InputError
from colossax.offload import DEVICE_SHARE
from colossax.planner.settling import Settled
from colossax.planner.task_step import settle_task, task_step
from colossax.planner.trial import choosing_for
from colossax.sharding import compiler_options
from colossax.step.step import Step
from colossax.tasks import TrainConfig, task_of


def settle_for_target(config: TrainConfig, target: Target) -> tuple[TrainConfig, Settled]:
    """The run with its plan settled for a target, and how; see `settle`.

    Raises:
        InputError: A budget does not do, or the CUDA compiler plugin is missing.
    """
    check_cudnn(config.plan, target)
    with choosing_for(target):
        devices = target_devices(target)
        settled = settle_task(task_of(config), config.plan, devices, target=target)
    return config.replace(plan=settled.plan), settled


def compiled_step(config: TrainConfig, target: Target) -> tuple[Step, Program, Any]:
    """A run's step, the program compiled for a target, and the names of what it saves.

    What the plan leaves open is settled for the target.
    """
    _, settled = settle_for_target(config, target)
    task = task_of(config)
    with choosing_for(target):
        step = task_step(task, settled, target_devices(target))
        batch = step.abstract_batch(task.shapes)
        traced = step.jitted.trace(step.abstract, batch)
        lowered = traced.lower()
    program = compile_program(lowered, options=compiler_options(step.bound))
    return step, program, checkpoint_stacks(traced.jaxpr)


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
