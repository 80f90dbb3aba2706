"""The optimizer a configuration asks for."""

from collections.abc import Callable
from typing import Any

import optax

from colossax.config import nearest
from colossax.errors import InputError
from colossax.optim import (
    DimsOptimizer,
    Groups,
    adafactor,
    adamw,
    adamw_8bit,
    came,
    constant,
    ema,
    galore,
    inverse_sqrt,
    lamb,
    lars,
    linear,
    lion,
    multistep,
    muon,
    one_cycle,
    polynomial,
    schedule_free,
    sgd,
    warmup_cosine,
    wsd,
)
from colossax.tasks.config import OptimizerConfig

_WSD_DECAY_SHARE = 0.2
_WITH_MOMENTUM = ("adafactor", "muon")
_OF_GALORE = ("rank", "interval", "scale")


def make_optimizer(config: OptimizerConfig, schedule_steps: int) -> DimsOptimizer:
    """The optimizer with its learning-rate schedule of `schedule_steps` steps.

    Raises:
        InputError: No such optimizer, or numbers it cannot take.
    """
    if config.name not in OPTIMIZERS:
        raise InputError(
            f"optimizer.name: unknown '{config.name}'{nearest(config.name, OPTIMIZERS)}"
        )
    if config.momentum is not None and config.name not in _WITH_MOMENTUM:
        raise InputError(
            f"optimizer.momentum: {config.name} takes none by that name; give optimizer.b1, or none"
        )
    for field in _OF_GALORE:
        if getattr(config, field) is not None and config.name != "galore":
            raise InputError(
                f"optimizer.{field}: {config.name} has none; give optimizer.name galore, or none"
            )
    made = OPTIMIZERS[config.name](config, make_schedule(config, schedule_steps))
    return made if config.ema is None else ema(made, config.ema)


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate by step, counted from 0.

    Raises:
        InputError: Numbers that the schedule cannot take.
    """
    peak, warmup = config.peak_lr, config.warmup
    ends = {"steps": steps, "end": peak * config.final_lr_share}
    decay = max(1, round(_WSD_DECAY_SHARE * max(steps - warmup, 1)))
    milestones = {int(step): share for step, share in config.milestones.items()}
    schedules: dict[str, Callable[[], optax.Schedule]] = {
        "constant": lambda: constant(peak, warmup=warmup),
        "cosine": lambda: warmup_cosine(peak, warmup=warmup, **ends),
        "inverse_sqrt": lambda: inverse_sqrt(peak, warmup=warmup),
        "linear": lambda: linear(peak, warmup=warmup, **ends),
        "multistep": lambda: multistep(peak, milestones=milestones, warmup=warmup),
        "one_cycle": lambda: one_cycle(peak, warmup=warmup or None, **ends),
        "polynomial": lambda: polynomial(peak, warmup=warmup, power=config.power, **ends),
        "wsd": lambda: wsd(peak, warmup=warmup, decay=decay, **ends),
    }
    return schedules[config.schedule]()


def _adafactor(config: OptimizerConfig, rate: optax.Schedule) -> DimsOptimizer:
    given: dict[str, Any] = {**_common(config), "moment_dtype": _one_moment(config)}
    return adafactor(rate, momentum=config.momentum, **given)


def _adamw(config: OptimizerConfig, rate: optax.Schedule) -> DimsOptimizer:
    if config.state == "8bit":
        numbers = {"b1": config.b1, "b2": config.b2, "eps": config.eps}
        return adamw_8bit(rate, **numbers, **_common(config))
    return adamw(rate, **_adam_options(config))


def _came(config: OptimizerConfig, rate: optax.Schedule) -> DimsOptimizer:
    given: dict[str, Any] = {"b1": config.b1, "b2": config.b2, "b3": config.b3, **_common(config)}
    return came(rate, **given, moment_dtype=_one_moment(config))


def _galore(config: OptimizerConfig, rate: optax.Schedule) -> DimsOptimizer:
    if config.state == "bfloat16":
        raise InputError(
            "optimizer.state: 'bfloat16' rounds second moments by the bits of gradients, of which"
            " galore keeps none; choose mixed or 8bit"
        )
    own = {name: getattr(config, name) for name in _OF_GALORE}
    given: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
    adam: dict[str, Any] = {"b1": config.b1, "b2": config.b2, "eps": config.eps}
    return galore(rate, **given, **adam, **_common(config), state=config.state)


def _lamb(config: OptimizerConfig, rate: optax.Schedule) -> DimsOptimizer:
    return lamb(rate, **_adam_options(config))


def _lars(config: OptimizerConfig, rate: optax.Schedule) -> DimsOptimizer:
    return lars(rate, **_momentum_options(config))


def _lion(config: OptimizerConfig, rate: optax.Schedule) -> DimsOptimizer:
    given: dict[str, Any] = {"b1": config.b1, "b2": config.b2, **_common(config)}
    return lion(rate, **given, moment_dtype=_one_moment(config))


def _muon(config: OptimizerConfig, rate: optax.Schedule) -> DimsOptimizer:
    momentum = {} if config.momentum is None else {"momentum": config.momentum}
    adam = {"b1": config.b1, "b2": config.b2, "eps": config.eps}
    given: dict[str, Any] = {**momentum, **adam, **_common(config)}
    return muon(rate, **given, moment_dtype=_one_moment(config))


def _schedule_free(config: OptimizerConfig, rate: optax.Schedule) -> DimsOptimizer:
    for name, found, only in (
        ("schedule", config.schedule, "constant"),
        ("state", config.state, "float32"),
        ("ema", config.ema, None),
    ):
        if found != only:
            raise InputError(
                f"optimizer.{name}: found {found}, and schedule_free averages the steps of a"
                f" constant rate, in float32; give {'none' if only is None else only}"
            )
    numbers = {"b1": config.b1, "b2": config.b2, "eps": config.eps}
    return schedule_free(rate, **numbers, **_common(config))


def _sgd(config: OptimizerConfig, rate: optax.Schedule) -> DimsOptimizer:
    return sgd(rate, **_momentum_options(config))


def _common(config: OptimizerConfig) -> dict[str, Any]:
    groups = Groups(multiples=config.multiples, decays=config.decays)
    return {"weight_decay": config.weight_decay, "groups": groups}


def _adam_options(config: OptimizerConfig) -> dict[str, Any]:
    if config.state == "8bit":
        raise InputError(_no_bytes(config))
    return {
        "b1": config.b1,
        "b2": config.b2,
        "eps": config.eps,
        "moment_dtype": "float32" if config.state == "float32" else "bfloat16",
        "second_moment_dtype": "bfloat16" if config.state == "bfloat16" else "float32",
        **_common(config),
    }


def _momentum_options(config: OptimizerConfig) -> dict[str, Any]:
    return {"momentum": config.b1, "moment_dtype": _one_moment(config), **_common(config)}


def _one_moment(config: OptimizerConfig) -> str:
    """Dtype of the one moment that an optimizer keeps for each parameter."""
    if config.state == "8bit":
        raise InputError(_no_bytes(config))
    if config.state == "mixed":
        raise InputError(
            f"optimizer.state: 'mixed' tells two moments apart, {config.name} has only one;"
            f" choose float32 or bfloat16"
        )
    return config.state


def _no_bytes(config: OptimizerConfig) -> str:
    return (
        f"optimizer.state: '8bit' is known to adamw and galore, not to {config.name}; choose"
        " bfloat16, or optimizer.name adamw"
    )


OPTIMIZERS: dict[str, Callable[[OptimizerConfig, optax.Schedule], DimsOptimizer]] = {
    "adafactor": _adafactor,
    "adamw": _adamw,
    "came": _came,
    "galore": _galore,
    "lamb": _lamb,
    "lars": _lars,
    "lion": _lion,
    "muon": _muon,
    "schedule_free": _schedule_free,
    "sgd": _sgd,
}
"""By name. LARS and SGD take `b1` as their momentum."""
