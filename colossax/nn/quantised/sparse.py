"""Matrices of which few of each four inputs are kept: their numbers, and where they stood."""

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from colossax.pallas import sparse_matmul
from colossax.pallas.sparse_matmul import FOUR


def pruned(w: Float[Array, "k n"], outs: Sequence[int], *, kept: int) -> dict[str, Array]:
    """The `kept` numbers of the largest absolute value of each four inputs of an output.

    Of two that are as large the earlier one stays. Of a matrix that is as sparse already nothing is
    lost.

    Args:
        w: The matrix, inputs by outputs.
        outs: Sizes of an output.
        kept: 1 or 2.

    Returns:
        `values` `[kept, *outs, k / 4]` in the type of `w`, and `index` int8, shaped alike: the
        place of each among its four, ascending along the first dim.
    """
    fours = w.reshape(-1, FOUR, *outs)
    order = jnp.argsort(-jnp.abs(fours), axis=1, stable=True)[:, :kept]
    index = jnp.sort(order, axis=1)
    values = jnp.take_along_axis(fours, index, axis=1)
    return {
        "values": jnp.moveaxis(values, (0, 1), (-1, 0)),
        "index": jnp.moveaxis(index, (0, 1), (-1, 0)).astype(jnp.int8),
    }


def expanded(parts: Mapping[str, Array], dtype: jnp.dtype) -> Float[Array, "*outs k"]:
    """The matrix that is kept, its inputs last, 0 where nothing was."""
    return sparse_matmul.expanded(parts["values"], parts["index"], dtype)
