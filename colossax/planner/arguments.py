"""What people give `boost` in place of its arguments, and the call that was meant."""

from collections.abc import Mapping
from typing import Any

import optax
from flax import nnx

from colossax.config import Plan, preset
from colossax.errors import InputError


def check_arguments(make_model: Any, optimizer: Any, loss: Any) -> None:
    """Refuse what is no factory, no optimizer or no loss.

    Raises:
        InputError: With the call that was meant.
    """
    for make in make_model.values() if isinstance(make_model, Mapping) else (make_model,):
        if isinstance(make, nnx.Module):
            name = type(make).__name__
            raise InputError(
                f"boost: make_model is a {name} that is built already; give what builds it, as"
                f" boost(lambda rngs: {name}(..., rngs=rngs), ...), so that every array is made"
                " where it will live"
            )
        if not callable(make):
            raise InputError(
                f"boost: make_model is {_shown(make)}; give a function of rngs that builds the"
                " model, as boost(lambda rngs: Model(rngs=rngs), ...)"
            )
    if isinstance(loss, optax.GradientTransformation):
        raise InputError(
            "boost: an optimizer stands in the place of the loss; give them in this order:"
            " boost(make_model, optimizer, loss, plan)"
        )
    if not callable(loss):
        raise InputError(
            f"boost: loss is {_shown(loss)}; give a function of model and batch, as"
            " boost(make_model, optimizer, lambda model, batch: ..., plan)"
        )
    of_models = optimizer.values() if isinstance(optimizer, Mapping) else (optimizer,)
    for one in of_models:
        if not isinstance(one, optax.GradientTransformation | optax.MultiSteps) and not callable(
            one
        ):
            rate = one if isinstance(one, int | float) else 1e-3
            raise InputError(
                f"boost: optimizer is {_shown(one)}; give a transformation, as"
                f" boost(make_model, optax.adamw({rate}), loss, plan)"
            )


def as_plan(plan: Any) -> Plan:
    """A plan, or the preset of this name.

    Raises:
        InputError: It is neither.
    """
    if isinstance(plan, str):
        return preset(plan)
    if not isinstance(plan, Plan):
        mesh = plan if isinstance(plan, Mapping) else {"fsdp": 8}
        raise InputError(
            f"boost: plan is {_shown(plan)}; give the name of a preset, as 'zero3', or a plan, as"
            f" colossax.Plan(mesh={dict(mesh)})"
        )
    return plan


def _shown(value: Any) -> str:
    """Short, in one line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else f"a {type(value).__name__}"
