"""What a step is made of: who updates the state in its program, and who follows the program."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax

from colossax.step.gradients.method import GradientMethod
from colossax.step.microbatches import Microbatches
from colossax.step.trainable import chosen, joined, split
from colossax.typing import Params, TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Updated:
    """What an update gives.

    Attributes:
        params: New, or the old ones where the gradients are not finite.
        opt_state: Likewise.
        gradients: `Gradients` of the batch; `grads` may be left out.
        finite: Whether loss and norm are.
        pending: For what follows the program; None where nothing does.
    """

    # While JAX takes it apart, its leaves are other things than arrays.
    params: Any
    opt_state: Any
    gradients: Any
    finite: Any
    pending: Any = None


jax.tree_util.register_dataclass(
    Updated, ["params", "opt_state", "gradients", "finite", "pending"], []
)


@runtime_checkable
class Updater(Protocol):
    """Takes the state from one step to the next, inside a program."""

    @property
    def gradients(self) -> GradientMethod:
        """Gradients alone, before clipping."""
        ...

    def update(self, state: TrainState, micro: Microbatches) -> Updated:
        """New parameters and optimizer state."""
        ...

    def init_state(self, params: Params, shardings: Any) -> Any:
        """Optimizer state for these parameters, each array made where it lives."""
        ...

    def pending_shardings(self, replicated: Any) -> Any:
        """Of what is left to whoever follows the program; None where nothing is.

        Args:
            replicated: Of what every device has.
        """
        ...

    def jitted(self, pure: Callable, shardings: TrainState, **options: Any) -> Any:
        """`pure` compiled, its old state given up."""
        ...


@runtime_checkable
class Follower(Protocol):
    """Finishes a step once its program has ended."""

    def update(self, state: TrainState, pending: Any) -> TrainState:
        """The state with its part of it updated."""
        ...


class WholeUpdate:
    """All parameters at once, when the gradients of the whole batch are there."""

    def __init__(
        self,
        gradients: GradientMethod,
        optimizer: optax.GradientTransformation,
        trainable: Any,
        clip_norm: float | None,
    ):
        """Bind; nothing is traced.

        Args:
            gradients: How to get them.
            optimizer: Of the parameters that learn.
            trainable: Tree of booleans.
            clip_norm: Global norm that gradients are scaled down to, or None.
        """
        self.gradients = gradients
        self._optimizer = optimizer
        self._trainable = trainable
        self._clip_norm = clip_norm

    def update(self, state: TrainState, micro: Microbatches) -> Updated:
        """See `Updater`."""
        gradients = self.gradients(state["params"], state["variables"], micro)
        grads, norm = gradients.grads, gradients.norm
        if self._clip_norm is not None:
            scale = jnp.minimum(1.0, self._clip_norm / jnp.maximum(norm, 1e-12))
            grads = jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)
        params, frozen = split(state["params"], self._trainable)
        steps, opt_state = self._optimizer.update(grads, state["opt_state"], params)
        new = joined(optax.apply_updates(params, steps), frozen), opt_state
        finite = gradients.finite
        new = jax.tree.map(
            lambda a, b: jnp.where(finite, a, b), new, (state["params"], state["opt_state"])
        )
        return Updated(params=new[0], opt_state=new[1], gradients=gradients, finite=finite)

    def init_state(self, params: Params, shardings: Any) -> Any:
        """See `Updater`."""
        init = jax.jit(self._optimizer.init, out_shardings=shardings)
        return init(chosen(params, self._trainable))

    def pending_shardings(self, replicated: Any) -> None:
        """Nothing is left."""
        return None

    def jitted(self, pure: Callable, shardings: TrainState, **options: Any) -> Any:
        """See `Updater`."""
        return jax.jit(pure, donate_argnums=0, **options)
