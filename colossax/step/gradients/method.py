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
        loss_scale: By which gradients and the root of `square_norm` are multiplied, but those of
            such parameters; None: they are as they are.
    """

    # While JAX takes it apart, its leaves are other things than arrays.
    grads: Any
    loss: Any
    totals: Any
    sums: Any
    square_norm: Any
    loss_scale: Any = None

    @property
    def norm(self) -> Any:
        """Global norm, of gradients without a scale."""
        norm = jnp.sqrt(self.square_norm)
        return norm if self.loss_scale is None else norm / self.loss_scale

    def factor(self, clip_norm: float | None) -> Any:
        """What gradients are multiplied by to be without scale and of no greater norm than this.

        Args:
            clip_norm: None: of any.

        Returns:
            A float32 scalar; None where they are that as they are.
        """
        return clipped(self.norm, clip_norm, self.loss_scale)

    def unscaled(self, infos: Any) -> "Gradients":
        """The same without a scale.

        Args:
            infos: Of the parameters; None where a gradient is.
        """
        scale = self.loss_scale
        if scale is None:
            return self

        def one(info: Any, grad: Any) -> Any:
            return grad if info.update is not None else (grad / scale).astype(grad.dtype)

        grads = jax.tree.map(one, infos, self.grads)
        square = self.square_norm / scale**2
        return dataclasses.replace(self, grads=grads, square_norm=square, loss_scale=None)

    @property
    def finite(self) -> Any:
        """Whether loss and norm are."""
        return jnp.isfinite(self.loss) & jnp.isfinite(self.norm)

    @property
    def shown(self) -> dict[str, Any]:
        """Each term and metric: the mean of what was added up, or the maximum."""
        return {name: _shown(value) for name, value in {**self.totals, **self.sums}.items()}


jax.tree_util.register_dataclass(
    Gradients, ["grads", "loss", "totals", "sums", "square_norm", "loss_scale"], []
)


def clipped(norm: Any, clip_norm: float | None, loss_scale: Any = None) -> Any:
    """What gradients of this norm are multiplied by; see `Gradients.factor`.

    Args:
        norm: Without the scale.
        clip_norm: Greatest norm they may have.
        loss_scale: By which they are multiplied.
    """
    factor = None if clip_norm is None else jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-12))
    if loss_scale is None:
        return factor
    return 1.0 / loss_scale if factor is None else factor / loss_scale


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
