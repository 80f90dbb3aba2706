"""A loss that is scaled before it is differentiated, and the scale from step to step.

The loss itself is never multiplied, so losses and metrics are those without a scale. Gradients stay
scaled up to the update, which divides by the scale in the multiplication that clips.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from colossax.config import LossScale

LOSS_SCALE = "loss_scale"
"""Of a state `{"scale": float32, "good_steps": int32}`, there where the plan scales the loss; of
metrics the scale that the step's gradients had."""

_SCALE, _GOOD_STEPS = "scale", "good_steps"


def first_scale(config: LossScale) -> dict[str, Any]:
    """Of a new run."""
    return {_SCALE: jnp.float32(config.initial), _GOOD_STEPS: jnp.int32(0)}


def scale_in(state: Any) -> Any:
    """The scale of a state; None where it has none."""
    return state[LOSS_SCALE][_SCALE] if LOSS_SCALE in state else None


def next_scale(
    config: LossScale, before: dict[str, Any], loss: Float[Array, ""], finite: Bool[Array, ""]
) -> dict[str, Any]:
    """The scale after a step. A loss that is not finite says nothing of it: no scale cures that.

    Args:
        config: How it changes.
        before: Of the step.
        loss: Of the step, not scaled.
        finite: Whether loss and gradient norm are, on all devices alike.

    Cost: three scalars; nothing is sent, as the norm is of all gradients already.
    """
    scale, good = before[_SCALE], before[_GOOD_STEPS] + 1
    grown = scale * config.growth_factor
    # Gradients that never overflow would let it grow for ever.
    grows = (good >= config.growth_interval) & jnp.isfinite(grown)
    fine = {
        _SCALE: jnp.where(grows, grown, scale),
        _GOOD_STEPS: jnp.where(good >= config.growth_interval, 0, good),
    }
    lower = jnp.maximum(scale * config.backoff_factor, jnp.float32(config.minimum))
    overflown = {_SCALE: lower, _GOOD_STEPS: jnp.int32(0)}
    kept = jax.tree.map(lambda a, b: jnp.where(jnp.isfinite(loss), a, b), overflown, before)
    return jax.tree.map(lambda a, b: jnp.where(finite, a, b), fine, kept)


@jax.custom_vjp
def scaled(loss: Float[Array, ""], scale: Float[Array, ""]) -> Float[Array, ""]:
    """The loss as it is; its gradients are multiplied by the scale."""
    return loss


scaled.defvjp(
    lambda loss, scale: (loss, scale), lambda scale, dloss: (dloss * scale, jnp.zeros_like(scale))
)
