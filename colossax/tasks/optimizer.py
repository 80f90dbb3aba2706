"""The optimizer a configuration asks for."""

from collections.abc import Callable
from typing import Any

import optax

from colossax.config import nearest
from colossax.errors import InputError
from colossax.optim import (
    DimsOptimizer,
    adamw,
    constant,
    lamb,
    lars,
    linear,
    sgd,
    warmup_cosine,
    wsd,
)
from colossax.tasks.config import OptimizerConfig

_WSD_DECAY_SHARE = 0.2


def make_optimizer(config: OptimizerConfig, schedule_steps: int) -> DimsOptimizer:
    """The optimizer with its learning-rate schedule of `schedule_steps` steps.

    Raises:
        InputError: No such optimizer, or numbers it cannot take.
    """
    if config.name not in OPTIMIZERS:
        raise InputError(
            f"optimizer.name: unknown '{config.name}'{nearest(config.name, OPTIMIZERS)}"
        )
    return OPTIMIZERS[config.name](config, make_schedule(config, schedule_steps))


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate by step, counted from 0."""
    peak, warmup = config.peak_lr, config.warmup
    end = peak * config.final_lr_share
    if config.schedule == "constant":
        return constant(peak, warmup=warmup)
    if config.schedule == "linear":
        return linear(peak, steps=steps, warmup=warmup, end=end)
    if config.schedule == "wsd":
        decay = max(1, round(_WSD_DECAY_SHARE * max(steps - warmup, 1)))
        return wsd(peak, steps=steps, warmup=warmup, decay=decay, end=end)
    return warmup_cosine(peak, steps=steps, warmup=warmup, end=end)


def _adamw(config: OptimizerConfig, rate: optax.Schedule) -> DimsOptimizer:
    return adamw(rate, **_adam_options(config))


def _lamb(config: OptimizerConfig, rate: optax.Schedule) -> DimsOptimizer:
    return lamb(rate, **_adam_options(config))


def _lars(config: OptimizerConfig, rate: optax.Schedule) -> DimsOptimizer:
    return lars(rate, **_momentum_options(config))


def _sgd(config: OptimizerConfig, rate: optax.Schedule) -> DimsOptimizer:
    return sgd(rate, **_momentum_options(config))


def _adam_options(config: OptimizerConfig) -> dict[str, Any]:
    return {
        "b1": config.b1,
        "b2": config.b2,
        "eps": config.eps,
        "weight_decay": config.weight_decay,
        "moment_dtype": "float32" if config.state == "float32" else "bfloat16",
        "second_moment_dtype": "bfloat16" if config.state == "bfloat16" else "float32",
    }


def _momentum_options(config: OptimizerConfig) -> dict[str, Any]:
    if config.state == "mixed":
        raise InputError(
            f"optimizer.state: 'mixed' tells two moments apart, {config.name} has only one;"
            f" choose float32 or bfloat16"
        )
    return {
        "momentum": config.b1,
        "weight_decay": config.weight_decay,
        "moment_dtype": config.state,
    }


OPTIMIZERS: dict[str, Callable[[OptimizerConfig, optax.Schedule], DimsOptimizer]] = {
    "adamw": _adamw,
    "lamb": _lamb,
    "lars": _lars,
    "sgd": _sgd,
}
"""By name. LARS and SGD take `b1` as their momentum."""
