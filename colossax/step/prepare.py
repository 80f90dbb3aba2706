"""What a loss wants to know of a global batch before the step: once, and without gradients."""

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax

from colossax.errors import InputError
from colossax.sharding import in_order, replicated, use
from colossax.step.arrange import in_natural_order
from colossax.step.batches import BatchPlacer
from colossax.step.microbatches import batch_dims
from colossax.typing import Batch, Params, TrainState

if TYPE_CHECKING:
    from colossax.step.step import Step

Prepare = Callable[..., Mapping[str, Any]]
"""`prepare(model, batch) -> batch`, also given `variables=` where its signature names them."""


def preparation(
    merge: Callable[[Params], Any], prepare: Prepare | None
) -> Callable[[Params, Any, Batch], Batch]:
    """`(params, variables, batch) -> batch` of a step.

    Args:
        merge: Parameters to model.
        prepare: See `Prepare`; None leaves the batch as it is.
    """
    if prepare is None:
        return lambda params, variables, batch: batch
    with_variables = "variables" in inspect.signature(prepare).parameters

    def prepared(params: Params, variables: Any, batch: Batch) -> Batch:
        params, variables = jax.lax.stop_gradient((params, variables))
        more = {"variables": variables} if with_variables else {}
        result = prepare(merge(params), dict(batch), **more)
        if not isinstance(result, Mapping):
            raise InputError(
                f"prepare: expected the batch with more arrays, found {type(result).__name__};"
                " return a dict such as {**batch, 'reference': ...}"
            )
        return dict(result)

    return prepared


class Preparation:
    """What a step's `prepare` adds to batches, by a program of its own; compiled for each form."""

    def __init__(self, step: "Step", compiler_options: Any):
        """Compile nothing yet.

        Args:
            step: Its plan and preparation are there.
            compiler_options: For the devices' compiler.
        """
        self._step, of_steps = step, step.batches
        how = {"any_order": of_steps.any_order, "any_form": True, "known": of_steps.known}
        self._batches = BatchPlacer(step.bound, step.options.batch_dims, **how)
        options = {"out_shardings": replicated(step.bound), "compiler_options": compiler_options}
        self._jitted = jax.jit(self._added, **options)

    def __call__(self, state: TrainState, batch: Batch) -> dict[str, jax.Array]:
        """See `Step.prepare`."""
        if self._step.options.prepare is None:
            raise InputError(
                "prepare: the step has none; give boost what makes more of a batch, as"
                " **reference_options()"
            )
        return self._jitted(state["params"], state["variables"], self._batches.place(batch))

    def _added(self, params: Params, variables: Any, batch: Batch) -> dict[str, jax.Array]:
        batch, order = self._batches.in_order(batch)
        with use(self._step.bound), in_order(order):
            made = self._step.prepared(params, variables, batch)
        added = {name: x for name, x in made.items() if name not in batch}
        return in_natural_order(added, batch_dims(made, self._step.options.batch_dims), order)
