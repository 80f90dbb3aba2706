"""A frozen weight kept in codes, made a matrix where it is multiplied."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array

from colossax.config import BoundPlan
from colossax.nn.quantised.coded import CodedWeight, matrix_of
from colossax.nn.quantised.codes import Packing
from colossax.sharding import constrain, current, use


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantisedWeight(CodedWeight):
    """A matrix in codes, which has no gradient.

    Cost: at rest 4.5 bits for each number in NF4, about 4.13 with scales in eight bits; 8 in int8,
    beside its scales. Devices gather codes and scales. The matrix in the compute dtype is there
    while it is multiplied, forward and again backward; no gradient of it is made.
    Source: Dettmers et al. 2023, QLoRA, section 3.
    """

    def product(self, x: Array) -> Array:
        """See `CodedWeight`; backward makes the matrix again."""
        return _product(_Static(self.packing, current()), x, self.parts)


@dataclasses.dataclass(frozen=True)
class _Static:
    packing: Packing
    bound: BoundPlan | None


# A rule of its own, so that backward keeps codes and makes the matrix again: else a scan would
# keep the matrices of all layers.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(static: _Static, x: Array, parts: dict[str, Array]) -> Array:
    with use(static.bound):
        w = matrix_of(static.packing, parts, x.dtype)
    return jnp.tensordot(x, w, axes=static.packing.contract)


def _product_fwd(static: _Static, x: Array, parts: dict[str, Array]):
    return _product(static, x, parts), parts


def _product_bwd(static: _Static, parts: dict[str, Array], dy: Array):
    contract, outs = static.packing.contract, len(static.packing.outs)
    with use(static.bound):
        w = matrix_of(static.packing, parts, dy.dtype)
        if dy.ndim == 3 and static.packing.dims[contract:] == ("embed",):
            dy = constrain(dy, "batch", "seq", "embed")  # the sequence as inside the block
    own = tuple(range(dy.ndim - outs, dy.ndim)), tuple(range(contract, w.ndim))
    return jnp.tensordot(dy, w, axes=own), None


_product.defvjp(_product_fwd, _product_bwd)
