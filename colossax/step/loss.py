"""What a loss is, and what it must give."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from colossax.errors import InputError
from colossax.layerwise import Maximum

Terms = dict[str, tuple[Array, Array, float]]
"""Per term: total over tokens, its weight (float32 scalars), coefficient in the loss.

The loss is the sum of `coefficient * total / weight`, each weight summed over the whole global
batch: over microbatches and devices, before the division.
"""


Sums = dict[str, tuple[Array, Array] | Maximum]
"""Additional metrics as (total, weight), reported as their quotient, or as a `Maximum`.

Totals and maxima may be arrays, such as one number for each layer; weights are scalars.
"""


Loss = Callable[..., tuple[Terms, Sums] | Array]
"""`loss(model, batch)`, also given `variables=`, `key=`, `row_keys=` if its signature has them.

`key` is of the microbatch; `row_keys` `[rows]` are of its rows, the same however a batch is cut.
Where a loss is evaluated both are None.

One number, such as a mean over the batch, is taken where a step has one microbatch: of several it
is not known what each counts.
"""


def any_order(loss: Loss) -> Loss:
    """Mark a loss that treats tokens one by one, so that their order in a row is free.

    A plan that passes keys and values around a ring may then lay out rows so that every device
    has as much of causal attention to do. Arrays of the batch with a dim `seq` are in the same
    order, positions and segments among them; a sum over tokens does not notice. A loss that
    compares neighbours (`x[:, 1:]` with `x[:, :-1]`) must not be marked.
    """
    loss.any_order = True  # type: ignore[attr-defined]
    return loss


def whole_batch(loss: Loss) -> Loss:
    """Mark a loss that compares the rows of a batch with each other, as negatives of a contrast.

    What it gives is of a whole global batch then: a plan that cuts one into microbatches, each of
    which would be compared with itself alone, is refused, and so are rows that fill up a batch to
    be evaluated. Devices share the batch as of any loss: inside of it arrays are whole.
    """
    loss.whole_batch = True  # type: ignore[attr-defined]
    return loss


SCALAR = "scalar"
"""The term of a loss that is one number: weight 1, coefficient 1."""


RESERVED = frozenset({"loss", "grad_norm", "tokens", "skipped", "loss_scale", SCALAR})
"""Names of the step's own metrics and terms."""


Totals = dict[str, Any]
"""As `Sums`."""


def checked(result: Any) -> tuple[Terms, Sums]:
    """What a loss gave, as terms and metrics in float32.

    Raises:
        InputError: It is something else.
    """
    if isinstance(result, jax.Array) and result.shape == ():
        return {SCALAR: (result.astype(jnp.float32), jnp.float32(1), 1.0)}, {}
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Mapping)):
        raise InputError(
            "loss: expected ({term: (total, weight, coefficient)}, metrics), found"
            f" {_kind(result)}; return totals over tokens and their weights"
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
        raise InputError(f"loss: '{name}' is {_kind(value)}; give (total, weight, coefficient)")
    return _scalar(name, value[0]), _scalar(name, value[1]), value[2]


def _metric(name: str, value: Any) -> Any:
    """Total and weight, or a maximum, in float32."""
    if isinstance(value, Maximum):
        return Maximum(jnp.asarray(value.value, jnp.float32))
    if not (isinstance(value, tuple) and len(value) == 2):
        raise InputError(f"loss: '{name}' is {_kind(value)}; give (total, weight), or a Maximum")
    return jnp.asarray(value[0], jnp.float32), _scalar(name, value[1])


def _kind(value: Any) -> str:
    """For people, of arrays the shape."""
    if isinstance(value, jax.Array):
        return f"an array of shape {list(value.shape)}" if value.shape else "an array of one number"
    if isinstance(value, tuple):
        return f"({', '.join(map(_kind, value))})"
    return repr(value) if isinstance(value, int | float) else f"a {type(value).__name__}"


def _scalar(name: str, value: Any) -> Array:
    if jnp.shape(value) != ():
        raise InputError(
            f"loss: '{name}' has shape {jnp.shape(value)} where one number belongs;"
            f" sum it over the tokens"
        )
    return jnp.asarray(value, jnp.float32)
