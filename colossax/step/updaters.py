"""What a step is made of: who updates the state in its program, and who follows the program."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax

from colossax.step.gradients.method import GradientMethod
from colossax.step.microbatches import Microbatches
from colossax.typing import Metrics, Params, TrainState

RECORDED = ("loss", "grad_norm", "tokens", "skipped")
"""Metrics that every step has: scalars, which a run records."""


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

    def update(self, state: TrainState, pending: Any, metrics: Metrics) -> TrainState:
        """The state with its part of it updated; the metrics are those of the program."""
        ...
