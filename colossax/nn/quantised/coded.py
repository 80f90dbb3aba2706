"""What weights in codes have in common: parts at rest, gathered as codes, and made a matrix."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from colossax.errors import InputError
from colossax.nn.quantised.codes import Packing, dequantise
from colossax.sharding import compute_dtype, constrain, current, gather_weight
from colossax.typing import Dims


@dataclasses.dataclass(frozen=True)
class CodedWeight:
    """A matrix kept in codes: all of a `Weight` but the product, which each type makes itself.

    Attributes:
        parts: What is kept of it, by name, at rest.
        packing: How.
    """

    parts: dict[str, Any]
    packing: Packing = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Weight`."""
        return self.packing.shape

    @property
    def dims(self) -> Dims:
        """See `Weight`."""
        return self.packing.dims

    @staticmethod
    def multiply(
        x: Array, maps: Sequence[tuple[Any, Array | None]], *, contract: int
    ) -> tuple[Array, ...]:
        """See `Weight`; the compiler moves inputs and outputs, whatever `tensor_matmul` says."""
        products = ((one.product(x), one.dims[contract:], bias) for one, bias in maps)
        return tuple(y if b is None else y + gather_weight(b, dims) for y, dims, b in products)

    def product(self, x: Array) -> Array:
        """`[*lead, *out]` of `x`, `[*lead, *in]`, in its dtype: by the matrix, made and let go."""
        matrix = matrix_of(self.packing, self.parts, x.dtype)
        return jnp.tensordot(x, matrix, axes=self.packing.contract)

    def rows(self, ids: Array) -> Array:
        """See `Weight`.

        Raises:
            InputError: A table is not kept in codes.
        """
        raise InputError("weights: rows are read of a matrix in codes; it is none of a map")

    def gathered(self, *, to: Dims | None = None) -> Array:
        """See `Weight`: what the codes stand for, which is written before it is multiplied."""
        w = matrix_of(self.packing, self.parts, compute_dtype(jnp.dtype("float32")))
        bound = current()
        if to is None or bound is None or "batch" not in bound.rules.activations:
            return w
        return constrain(w, *to)

    def whole(self, name: str) -> Array:
        """A part, gathered as it is."""
        return whole_part(self.packing, name, self.parts[name])


def whole_part(packing: Packing, name: str, part: Array) -> Array:
    """A part of a matrix, gathered along the axes that split the batch, in its own type."""
    return gather_weight(part, packing.part_dims()[name], dtype=part.dtype)


def matrix_of(packing: Packing, parts: dict[str, Array], dtype: jnp.dtype) -> Array:
    """Parts gathered as they are, then the matrix."""
    whole = {name: whole_part(packing, name, part) for name, part in parts.items()}
    return dequantise(packing, whole, dtype)
