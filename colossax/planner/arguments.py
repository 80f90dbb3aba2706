"""What people give `boost` in place of its arguments, and the call that was meant."""

import dataclasses
import inspect
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from colossax.config import Plan, nearest, preset
from colossax.errors import InputError
from colossax.step.microbatches import ROW_KEYS
from colossax.step.options import StepOptions

_LOSS = "lambda model, batch: ..."


def check_arguments(make_model: Any, optimizer: Any, loss: Any, verb: str = "boost") -> None:
    """Refuse what is no factory, no optimizer or no loss.

    Args:
        make_model: See `boost`.
        optimizer: See `boost`.
        loss: See `boost`.
        verb: The function that is called, `boost` or `plan`.

    Raises:
        InputError: With the call that was meant.
    """
    for make in make_model.values() if isinstance(make_model, Mapping) else (make_model,):
        if isinstance(make, nnx.Module):
            name = type(make).__name__
            raise InputError(
                f"{verb}: make_model is a {name} that is built already; give what builds it, as"
                f" {verb}(lambda rngs: {name}(..., rngs=rngs), ...), so that every array is made"
                " where it will live"
            )
        if _of_linen(make):
            raise InputError(
                f"{verb}: make_model is {_named(make)} of flax.linen; write the model as a module"
                f" of flax.nnx, and give {verb}(lambda rngs: Model(..., rngs=rngs), ...)"
            )
        if type(make).__module__.startswith("colossax.models."):
            raise InputError(
                f"{verb}: make_model is a {type(make).__name__}; give what builds such a model, as"
                f" {verb}(colossax.models.maker(config), ...)"
            )
        if not callable(make):
            raise InputError(
                f"{verb}: make_model is {_shown(make)}; give a function of rngs that builds the"
                f" model, as {verb}(lambda rngs: Model(rngs=rngs), ...)"
            )
        if (taken := _not_taken(make, 1)) is not None:
            raise InputError(
                f"{verb}: make_model is called with one argument, rngs, and {_named(make)} takes"
                f" {taken}; give {verb}(lambda rngs: ..., ...), which builds the model"
            )
    if isinstance(loss, optax.GradientTransformation):
        raise InputError(
            f"{verb}: an optimizer stands in the place of the loss; give them in this order:"
            f" {_call(verb)}"
        )
    if not callable(loss):
        raise InputError(
            f"{verb}: loss is {_shown(loss)}; give a function of model and batch, as"
            f" {_call(verb, loss=_LOSS)}"
        )
    if (taken := _not_taken(loss, 2, "variables", "key", ROW_KEYS)) is not None:
        raise InputError(
            f"{verb}: the loss is called with model and batch, and {_named(loss)} takes {taken};"
            f" give {_call(verb, loss=_LOSS)}, or call it first"
            " if it makes a loss"
        )
    of_models = optimizer.values() if isinstance(optimizer, Mapping) else (optimizer,)
    for one in of_models:
        known = isinstance(one, optax.GradientTransformation | optax.MultiSteps)
        if not known and (not callable(one) or _of_optax(one)):
            rate = one if isinstance(one, int | float) else 1e-3
            shown = _shown_of_optax(one) if callable(one) else _shown(one)
            raise InputError(
                f"{verb}: optimizer is {shown}; give a transformation, as"
                f" {_call(verb, optimizer=f'optax.adamw({rate})')}"
            )


def _call(verb: str, *, optimizer: str = "optimizer", loss: str = "loss") -> str:
    """The call that was meant, with its arguments in their order."""
    if verb == "plan":
        return f"plan(make_model, {loss}, {optimizer}, batch, target)"
    return f"{verb}(make_model, {optimizer}, {loss}, plan)"


def check_placing(devices: Any, seed: Any) -> None:
    """Refuse what are no devices, or no seed.

    Raises:
        InputError: With the call that was meant.
    """
    several = isinstance(devices, Sequence | np.ndarray) and len(devices) > 0
    if devices is not None and not (several and all(isinstance(d, jax.Device) for d in devices)):
        raise InputError(
            f"boost: devices is {_shown(devices)}; give a list of devices, as"
            " boost(..., devices=jax.devices()[:1]), or leave it out for all of them"
        )
    if not isinstance(seed, numbers.Integral) or isinstance(seed, bool):
        raise InputError(f"boost: seed is {_shown(seed)}; give a whole number, as seed=0")


def step_options(options: Mapping[str, Any], verb: str = "boost") -> StepOptions:
    """Keywords of `boost`, or of another function, as options of a step.

    Raises:
        InputError: There is none of that name, or it is given another thing.
    """
    names = [field.name for field in dataclasses.fields(StepOptions)]
    for name in options:
        if name not in names:
            raise InputError(f"{verb}: no option is called '{name}'{nearest(name, names)}")
    return StepOptions(**options)


def as_plan(plan: Any, verb: str = "boost") -> Plan:
    """A plan, or the preset of this name.

    Args:
        plan: Either.
        verb: Of the call that was given it.

    Raises:
        InputError: It is neither.
    """
    if isinstance(plan, str):
        return preset(plan)
    if not isinstance(plan, Plan):
        mesh = plan if isinstance(plan, Mapping) else {"fsdp": 8}
        raise InputError(
            f"{verb}: plan is {_shown(plan)}; give the name of a preset, as 'zero3', or a plan, as"
            f" colossax.Plan(mesh={dict(mesh)})"
        )
    return plan


def _not_taken(function: Any, count: int, *keywords: str) -> str | None:
    """What a function takes, where it is not this many arguments by place; None where it does."""
    built = isinstance(function, type)
    try:
        signature = inspect.signature(function.__init__ if built else function)
    except (TypeError, ValueError):
        return None
    given = {name: None for name in keywords if name in signature.parameters}
    try:
        signature.bind(*(None,) * (count + built), **given)
    except TypeError:
        taken = list(signature.parameters.values())[built:]
        return (
            ", ".join(
                f"{one.name}=" if one.kind == one.KEYWORD_ONLY else one.name
                for one in taken
                if one.default is one.empty or len(taken) < 4
            )
            or "none"
        )
    return None


def _of_linen(make: Any) -> bool:
    kind = make if isinstance(make, type) else type(make)
    return any(base.__module__.startswith("flax.linen") for base in kind.__mro__)


def _of_optax(function: Any) -> bool:
    return getattr(function, "__module__", "").startswith("optax.")


def _shown_of_optax(function: Any) -> str:
    return f"the function optax.{getattr(function, '__qualname__', '').split('.')[0]}"


def _named(thing: Any) -> str:
    """The name of a function or class, or of what kind something is."""
    return getattr(thing, "__name__", type(thing).__name__)


def _shown(value: Any) -> str:
    """Short, in one line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else f"a {type(value).__name__}"
