"""The optimizer a configuration asks for."""

from collections.abc import Callable

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
from colossax.train.config import OptimizerConfig

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
    return adamw(rate, b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay)


def _lamb(config: OptimizerConfig, rate: optax.Schedule) -> DimsOptimizer:
    return lamb(rate, b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay)


def _lars(config: OptimizerConfig, rate: optax.Schedule) -> DimsOptimizer:
    return lars(rate, momentum=config.b1, weight_decay=config.weight_decay)


def _sgd(config: OptimizerConfig, rate: optax.Schedule) -> DimsOptimizer:
    return sgd(rate, momentum=config.b1, weight_decay=config.weight_decay)


OPTIMIZERS: dict[str, Callable[[OptimizerConfig, optax.Schedule], DimsOptimizer]] = {
    "adamw": _adamw,
    "lamb": _lamb,
    "lars": _lars,
    "sgd": _sgd,
}
"""By name. LARS and SGD take `b1` as their momentum."""
