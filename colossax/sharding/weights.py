"""Weights: values that know how they are gathered, multiplied, looked up and differentiated."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Float, Int

from colossax.typing import Dims


@runtime_checkable
class Weight(Protocol):
    """A matrix `[*in, *out]`, or a table `[rows, d]`, kept as its type likes: a pytree of arrays.

    What it multiplies is differentiated as anything else in JAX; a type may bring rules of its own
    (`jax.custom_vjp`), of which each array's gradient has that array's shape and dtype; those of
    integers have none.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the matrix, whatever is kept of it."""
        ...

    @property
    def dims(self) -> Dims:
        """Their logical names."""
        ...

    @staticmethod
    def multiply(
        x: Array, maps: Sequence[tuple[Any, Array | None]], *, contract: int
    ) -> tuple[Array, ...]:
        """`x` times the weight, plus bias, of each map: all those of this type and one input.

        So a type may gather or quantise `x` once for all. Weights made of others multiply them by
        one call of `linears`.

        Args:
            x: `[*lead, *in]` in the compute dtype.
            maps: Weights of this type, each with its bias `[*out]` at rest or None.
            contract: How many dims `*in` are.

        Returns:
            `[*lead, *out]` of each, in the compute dtype.
        """
        ...

    def rows(self, ids: Int[Array, "b s"]) -> Float[Array, "b s d"]:
        """Rows of a table in the compute dtype; see `colossax.sharding.lookup`."""
        ...

    def gathered(self, *, to: Dims | None = None) -> Array:
        """The dense matrix in the compute dtype, gathered along the axes that split the batch.

        Args:
            to: See `colossax.sharding.gather_weight`.
        """
        ...
