"""What a way to get gradients takes and gives."""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from colossax.layerwise import Maximum
from colossax.step.microbatches import Microbatches
from colossax.typing import Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gradients:
    """Of the loss over a global batch, or over a part of it.

    Attributes:
        grads: Like the parameters, None for those that do not learn.
        loss: float32.
        totals: Terms of the loss as (total, weight).
        sums: Metrics as (total, weight).
        square_norm: Sum of the squares of all gradients, float32; but of parameters with a rule
            of their own.
    """

    # While JAX takes it apart, its leaves are other things than arrays.
    grads: Any
    loss: Any
    totals: Any
    sums: Any
    square_norm: Any

    @property
    def norm(self) -> Any:
        """Global norm."""
        return jnp.sqrt(self.square_norm)

    @property
    def finite(self) -> Any:
        """Whether loss and norm are."""
        return jnp.isfinite(self.loss) & jnp.isfinite(self.norm)

    @property
    def shown(self) -> dict[str, Any]:
        """Each term and metric: the mean of what was added up, or the maximum."""
        return {name: _shown(value) for name, value in {**self.totals, **self.sums}.items()}


jax.tree_util.register_dataclass(Gradients, ["grads", "loss", "totals", "sums", "square_norm"], [])


def _shown(value: Any) -> jax.Array:
    if isinstance(value, Maximum):
        return value.value
    total, weight = value
    return total / jnp.where(weight > 0, weight, 1.0)


@runtime_checkable
class GradientMethod(Protocol):
    """A way to get the gradients of a global batch."""

    def __call__(self, params: Params, variables: Any, micro: Microbatches) -> Gradients:
        """Gradients in the accumulation dtype, laid out by the plan's rules for gradients.

        Every term of the loss is divided by its own weight in the whole global batch, so that the
        result does not depend on how the batch is cut.
        """
        ...
