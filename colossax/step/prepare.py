"""What a loss wants to know of a global batch before the step: once, and without gradients."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax

from colossax.errors import InputError
from colossax.typing import Batch, Params

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
