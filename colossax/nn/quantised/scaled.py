"""A matrix in codes of eight bits that is multiplied as it is; scales multiply the product."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from colossax.errors import InputError
from colossax.nn.quantised.codes import Packing, dequantise
from colossax.sharding import compute_dtype, constrain, current, gather_weight
from colossax.typing import Dims


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScaledWeight:
    """Codes with a scale for each output: `(x @ codes) * scales`. For inference, without gradients.

    Codes are whole in the compute dtype (8 bits in the 8 of bfloat16's mantissa), so the product is
    that of the matrix that they stand for, up to rounding. With scales on the codes' side compilers
    write the matrix in the compute dtype before they multiply.

    Attributes:
        parts: `codes`, split as the matrix, and `scales`, split as an output; at rest.
        packing: How; `int8` or `fp8`.

    Cost: a byte for each number at rest, and read once where few tokens are multiplied:
    tests/aot/test_serving_weights.py counts.
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
        return tuple(one._times(x, bias, contract) for one, bias in maps)

    def _times(self, x: Array, bias: Array | None, contract: int) -> Array:
        lead, outs, out_dims = x.shape[: x.ndim - contract], self.packing.outs, self.dims[contract:]
        codes = self._whole("codes").astype(x.dtype)
        # Sums of codes are too large for float16.
        wide = jnp.float32 if x.dtype == jnp.float16 else x.dtype
        y = jnp.dot(
            x.reshape(*lead, self.packing.inputs),
            codes.reshape(self.packing.inputs, math.prod(outs)),
            preferred_element_type=wide,
        )
        y = (y.astype(jnp.float32) * self._whole("scales").reshape(-1)).astype(x.dtype)
        y = y.reshape(*lead, *outs)
        return y if bias is None else y + gather_weight(bias, out_dims)

    def rows(self, ids: Array) -> Array:
        """See `Weight`.

        Raises:
            InputError: A table is not kept in codes.
        """
        raise InputError("weights: rows are read of a matrix in codes; it is none of a map")

    def gathered(self, *, to: Dims | None = None) -> Array:
        """See `Weight`: what the codes stand for, which is written before it is multiplied."""
        parts = {name: self._whole(name) for name in self.parts}
        w = dequantise(self.packing, parts, compute_dtype(jnp.dtype("float32")))
        bound = current()
        if to is None or bound is None or "batch" not in bound.rules.activations:
            return w
        return constrain(w, *to)

    def _whole(self, name: str) -> Array:
        part = self.parts[name]
        return gather_weight(part, self.packing.part_dims()[name], dtype=part.dtype)
