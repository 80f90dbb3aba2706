"""What layers and losses count beside their results, put together over microbatches and devices."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Maximum:
    """A value of which the largest counts, not the sum: of two parts of a batch the larger.

    Attributes:
        value: float32 array.
    """

    value: Any


def added(one: Any, other: Any) -> Any:
    """Trees of arrays added leaf by leaf; of a `Maximum` the larger."""
    return _over(one, other, add=jnp.add, larger=jnp.maximum)


def summed(tree: Any) -> Any:
    """Trees of arrays summed up over dim 0; of a `Maximum` the largest along it."""
    return _over(
        tree,
        add=lambda x: jnp.sum(x, axis=0),
        larger=lambda x: jnp.max(x, axis=0),
    )


def nothing(shapes: Any) -> Any:
    """What `added` leaves the other as it is, for these shapes."""
    return _over(
        shapes,
        add=lambda x: jnp.zeros(x.shape, x.dtype),
        larger=lambda x: jnp.full(x.shape, -jnp.inf, x.dtype),
    )


def _over(*trees: Any, add: Callable[..., Array], larger: Callable[..., Array]) -> Any:
    def one(*leaves: Any) -> Any:
        if isinstance(leaves[0], Maximum):
            return Maximum(larger(*(leaf.value for leaf in leaves)))
        return add(*leaves)

    return jax.tree.map(one, *trees, is_leaf=lambda x: isinstance(x, Maximum))
