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
from colossax.pallas.target import target as pallas_target
from colossax.planner.fitting import Fitted
from colossax.planner.run_step import batch_shapes, fit_run, run_step
from colossax.sharding import compiler_options
from colossax.step.step import Step
from colossax.tasks.config import TrainConfig

RESERVE = 0.03
"""Share of a GPU's memory left free: for workspaces that tuning on the GPU will choose, the CUDA
context and fragmentation."""


def fit_to_target(config: TrainConfig, target: Target) -> tuple[TrainConfig, Fitted | None]:
    """The run with shares in place of `plan.offload.auto`, found for a target; see `fit_run`.

    Raises:
        InputError: A budget does not do, or the CUDA compiler plugin is missing.
    """
    if not config.plan.offload.auto:
        return config, None
    check_cudnn(config.plan, target)
    return fit_run(config, target_devices(target), target=target)


def compiled_step(config: TrainConfig, target: Target) -> tuple[Step, Program, Any]:
    """A run's step, the program compiled for a target, and the names of what it saves."""
    devices = target_devices(target)
    check_cudnn(config.plan, target)
    with pallas_target("gpu", compute_capability=target.gpu.compute_capability):
        step = run_step(config, devices)
        batch = step.abstract_batch(batch_shapes(config))
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
    return target.gpu.memory_bytes * (1 - RESERVE)
