"""A frozen weight kept in codes, made a matrix where it is multiplied."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from colossax.config import BoundPlan
from colossax.errors import InputError
from colossax.nn.quantised.codes import Packing, dequantise
from colossax.sharding import compute_dtype, constrain, current, gather_weight, use
from colossax.typing import Dims


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantisedWeight:
    """A matrix in codes, which has no gradient.

    Attributes:
        parts: What is kept of it, by name, at rest.
        packing: How.

    Cost: at rest 4.5 bits for each number in NF4, about 4.13 with scales in eight bits; 8 in int8,
    beside its scales. Devices gather codes and scales. The matrix in the compute dtype is there
    while it is multiplied, forward and again backward; no gradient of it is made.
    Source: Dettmers et al. 2023, QLoRA, section 3.
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
        y = _product(_Static(self.packing, current()), x, self.parts)
        return y if bias is None else y + gather_weight(bias, self.dims[contract:])

    def rows(self, ids: Array) -> Array:
        """See `Weight`.

        Raises:
            InputError: A table is not kept in codes.
        """
        raise InputError("adapter.base: rows are read of a matrix in codes; it is none of a map")

    def gathered(self, *, to: Dims | None = None) -> Array:
        """See `Weight`."""
        w = _matrix(self.packing, self.parts, compute_dtype(jnp.dtype("float32")))
        bound = current()
        if to is None or bound is None or "batch" not in bound.rules.activations:
            return w
        return constrain(w, *to)


@dataclasses.dataclass(frozen=True)
class _Static:
    packing: Packing
    bound: BoundPlan | None


def _matrix(packing: Packing, parts: dict[str, Array], dtype: jnp.dtype) -> Array:
    """Codes and scales gathered, then the matrix."""
    dims = packing.part_dims()
    whole = {
        name: gather_weight(part, dims[name], dtype=part.dtype) for name, part in parts.items()
    }
    return dequantise(packing, whole, dtype)


# A rule of its own, so that backward keeps codes and makes the matrix again: else a scan would
# keep the matrices of all layers.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(static: _Static, x: Array, parts: dict[str, Array]) -> Array:
    with use(static.bound):
        w = _matrix(static.packing, parts, x.dtype)
    return jnp.tensordot(x, w, axes=static.packing.contract)


def _product_fwd(static: _Static, x: Array, parts: dict[str, Array]):
    return _product(static, x, parts), parts


def _product_bwd(static: _Static, parts: dict[str, Array], dy: Array):
    contract, outs = static.packing.contract, len(static.packing.outs)
    with use(static.bound):
        w = _matrix(static.packing, parts, dy.dtype)
        if dy.ndim == 3 and static.packing.dims[contract:] == ("embed",):
            dy = constrain(dy, "batch", "seq", "embed")  # the sequence as inside the block
    own = tuple(range(dy.ndim - outs, dy.ndim)), tuple(range(contract, w.ndim))
    return jnp.tensordot(dy, w, axes=own), None


_product.defvjp(_product_fwd, _product_bwd)
