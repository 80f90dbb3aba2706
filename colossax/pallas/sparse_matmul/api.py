"""One matmul with N:M sparse weights, several implementations: the call, checks and choice."""

from types import ModuleType

import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

from colossax.pallas.choice import Choice
from colossax.pallas.target import current_target
from colossax.pallas.varying import varies

from . import interpret, mosaic_gpu, xla
from .spec import FOUR, KEPT, SparseSpec

IMPLEMENTATIONS: dict[str, ModuleType] = {
    "mosaic": mosaic_gpu,
    "xla": xla,
    "interpret": interpret,
}
"""Fastest first; `xla` takes everything, so `auto` never comes to the one behind it."""

UNPROVEN = "mosaic"
"""What `auto` takes only once it has proved itself on the device that is there."""

_CHOICE = Choice("sparse_matmul", IMPLEMENTATIONS, UNPROVEN)
choose, declined_by = _CHOICE.choose, _CHOICE.declined_by


def sparse_matmul(
    x: Float[Array, "m k"],
    values: Float[Array, "a n q"],
    index: Int8[Array, "a n q"],
    *,
    implementation: str = "auto",
) -> Float[Array, "m n"]:
    """Few rows times a matrix of which one or two of each four inputs of an output are kept.

        w[4 q + index[a, n, q], n] = values[a, n, q], else 0;  out = x @ w

    Args:
        x: Rows.
        values: `[1 or 2, n, k / 4]`.
        index: Places in their fours, of 0 to 3; those of one four differ.
        implementation: `auto` takes the first that accepts, `mosaic` only once proved on the device
            that is there; or `mosaic`, `xla`, `interpret`.

    Returns:
        In x's dtype, summed in float32.

    Raises:
        ValueError: Shapes contradict one another, or `implementation` is no name.
        NotImplementedError: The implementation named does not take this call, says why.

    Cost: `mosaic` reads `3 k n / 4` bytes of weights for each of the four that is kept, of values
    in bfloat16; `xla` writes them as numbers.
    """
    _check(x, values, index)
    spec = SparseSpec(
        rows=x.shape[0],
        inputs=x.shape[1],
        outputs=values.shape[1],
        dtype=x.dtype,
        kept=len(values),
        checked=varies((x, values)),
    )
    chosen = choose(spec, current_target(), implementation)
    # Of another type at rest, what is kept is written anew.
    found = IMPLEMENTATIONS[chosen].multiply(x, values.astype(x.dtype), index)
    return found.astype(x.dtype)


def _check(x: Array, values: Array, index: Array) -> None:
    shapes = f"x {x.shape}, values {values.shape}, index {index.shape}"
    fit = x.ndim == 2 and values.ndim == 3 and values.shape == index.shape
    if not (fit and x.shape[1] == FOUR * values.shape[2] and len(values) in KEPT):
        raise ValueError(
            f"sparse_matmul: {shapes} do not fit; they are [m, k] and twice [1 or 2, n, k / {FOUR}]"
        )
    if 0 in (*x.shape, *values.shape):
        raise ValueError(f"sparse_matmul: {shapes}: no dim may be 0")
    if index.dtype != jnp.int8:
        raise ValueError(f"sparse_matmul: index of {index.dtype}; give int8, a place for each")
