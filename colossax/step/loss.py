"""What a loss is, and how the step calls it."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from colossax.compat import inputs_used
from colossax.errors import InputError
from colossax.layerwise import Maximum
from colossax.step.microbatches import Microbatches
from colossax.step.trainable import joined
from colossax.typing import Batch, Params

Terms = dict[str, tuple[Array, Array, float]]
"""Per term: total over tokens, its weight (float32 scalars), coefficient in the loss.

The loss is the sum of `coefficient * total / weight`, each weight summed over the whole global
batch: over microbatches and devices, before the division.
"""


Sums = dict[str, tuple[Array, Array] | Maximum]
"""Additional metrics as (total, weight), reported as their quotient, or as a `Maximum`.

Totals and maxima may be arrays, such as one number for each layer; weights are scalars.
"""


Loss = Callable[..., tuple[Terms, Sums]]
"""`loss(model, batch)`, also given `variables=` and `key=` where its signature names them."""


def any_order(loss: Loss) -> Loss:
    """Mark a loss that treats tokens one by one, so that their order in a row is free.

    A plan that passes keys and values around a ring may then lay out rows so that every device
    has as much of causal attention to do. Arrays of the batch with a dim `seq` are in the same
    order, positions and segments among them; a sum over tokens does not notice. A loss that
    compares neighbours (`x[:, 1:]` with `x[:, :-1]`) must not be marked.
    """
    loss.any_order = True  # type: ignore[attr-defined]
    return loss


RESERVED = frozenset({"loss", "grad_norm", "tokens", "skipped"})
"""Names of the step's own metrics."""


Totals = dict[str, Any]
"""As `Sums`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossCall:
    """A loss with its model's structure: parameters in, numbers out.

    Attributes:
        merge: Parameters to model.
        loss: See `Loss`.
    """

    merge: Callable[[Params], Any]
    loss: Loss

    def __call__(
        self, params: Params, batch: Batch, variables: Any, key: Array | None
    ) -> tuple[Terms, Sums]:
        """Terms and metrics of one microbatch, in float32.

        Raises:
            InputError: The loss returns something else.
        """
        names = inspect.signature(self.loss).parameters
        given = {"variables": variables, "key": key}
        wanted = {name: value for name, value in given.items() if name in names}
        result = self.loss(self.merge(params), batch, **wanted)
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Mapping)):
            raise InputError(
                "loss: expected ({term: (total, weight, coefficient)}, metrics),"
                f" found {type(result).__name__}; return totals over tokens and their weights"
            )
        terms, metrics = result
        taken = {*RESERVED, *terms}
        clash = sorted(taken.intersection(metrics) | RESERVED.intersection(terms))
        if clash or not terms:
            raise InputError(
                f"loss: it names {clash or 'no terms'}; give at least one term, each term and"
                f" metric a name of its own, none of them in {sorted(RESERVED)}"
            )
        terms = {name: _term(name, term) for name, term in terms.items()}
        return terms, {name: _metric(name, value) for name, value in metrics.items()}


def _term(name: str, value: Any) -> Any:
    """Total and weight as float32 scalars, and the coefficient."""
    if not (isinstance(value, tuple) and len(value) == 3):
        raise InputError(f"loss: '{name}' is {value!r}; give (total, weight, coefficient)")
    return _scalar(name, value[0]), _scalar(name, value[1]), value[2]


def _metric(name: str, value: Any) -> Any:
    """Total and weight, or a maximum, in float32."""
    if isinstance(value, Maximum):
        return Maximum(jnp.asarray(value.value, jnp.float32))
    if not (isinstance(value, tuple) and len(value) == 2):
        raise InputError(f"loss: '{name}' is {value!r}; give (total, weight), or a Maximum")
    return jnp.asarray(value[0], jnp.float32), _scalar(name, value[1])


def _scalar(name: str, value: Any) -> Array:
    if jnp.shape(value) != ():
        raise InputError(
            f"loss: '{name}' has shape {jnp.shape(value)} where one number belongs;"
            f" sum it over the tokens"
        )
    return jnp.asarray(value, jnp.float32)


def objective(terms: Terms, metrics: Sums, batch_weights: Any) -> tuple[Any, tuple[Totals, Totals]]:
    """The loss of a microbatch, and its terms and metrics as (total, weight).

    Args:
        terms: What the loss gave.
        metrics: Likewise.
        batch_weights: Weights of the terms in the whole global batch; None: this is all of it.
    """
    weights = {name: jax.lax.stop_gradient(weight) for name, (_, weight, _) in terms.items()}
    batch_weights = weights if batch_weights is None else batch_weights
    parts = [
        coefficient * total / jnp.where(batch_weights[name] > 0, batch_weights[name], 1.0)
        for name, (total, _, coefficient) in terms.items()
    ]
    totals = {name: (total, weights[name]) for name, (total, _, _) in terms.items()}
    return sum(parts), (totals, dict(metrics))


def with_term_weights(
    call: LossCall, params: Params, frozen: Params, variables: Any, micro: Microbatches
) -> Microbatches:
    """The microbatches with the weights of the loss's terms in all of them.

    They come from a forward pass of which nothing that parameters reach remains.

    Args:
        call: The loss.
        params: Those that learn, None elsewhere.
        frozen: The others.
        variables: See `TrainState`.
        micro: Without weights.

    Raises:
        InputError: A weight depends on parameters.
    """

    def weigh(params: Params, microbatch: Batch, key: Array) -> dict[str, Array]:
        terms, _ = call(joined(params, frozen), microbatch, variables, key)
        return {name: weight for name, (_, weight, _) in terms.items()}

    used = inputs_used(weigh, params, *micro.first)
    count = len(jax.tree.leaves(params))
    if any(used[:count]):
        raise InputError(
            "loss: the weight of a term depends on parameters, which would make its gradient wrong;"
            " compute weights from the batch alone"
        )
    if micro.count == 1:
        return micro
    each = jax.lax.map(lambda xs: weigh(params, *xs), (micro.arrays, micro.keys))
    return dataclasses.replace(micro, term_weights=jax.tree.map(jnp.sum, each))
