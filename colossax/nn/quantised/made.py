"""Weights in groups of four bits, and sparse ones: to generate with.

In XLA alone no form of these products reads less than one that writes the matrix: compilers do not
take bytes apart, or choose by an index, where they multiply. So that is what is done, in few lines,
where there is no kernel (`by_kernel`); what either costs is counted in
tests/aot/test_packed_weights.py.
"""

import dataclasses

import jax
from jaxtyping import Array

from colossax.nn.quantised.by_kernel import grouped_product, sparse_product
from colossax.nn.quantised.coded import CodedWeight
from colossax.nn.quantised.sparse import expanded


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GroupedWeight(CodedWeight):
    """Codes of four bits with a scale, and perhaps a zero, for each group of inputs; or a `Grid`.

    Cost: at rest 4 bits for each number, 16 for each group, and 8 for its zero. Where the kernel is
    taken (`by_kernel`) these are read; else the matrix in the compute dtype is there while it is
    multiplied.
    """

    def product(self, x: Array) -> Array:
        """See `CodedWeight`; by the kernel where it is taken."""
        y = grouped_product(self.packing, self.parts, x)
        return super().product(x) if y is None else y


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SparseWeight(CodedWeight):
    """One or two of each four inputs of an output, with their places.

    Cost: at rest a quarter or half of the numbers, and a byte for each of these. Where the kernel
    is taken (`by_kernel`) these are read; else the matrix in the compute dtype is there while it is
    multiplied.
    """

    def product(self, x: Array) -> Array:
        """See `CodedWeight`; by the kernel where it is taken."""
        y = sparse_product(self.packing, self.parts, x)
        return self._plain(x) if y is None else y

    def _plain(self, x: Array) -> Array:
        """By a matrix that has its inputs last, as what is kept of it has."""
        lead = x.shape[: x.ndim - self.packing.contract]
        w = expanded({name: self.whole(name) for name in self.parts}, x.dtype)
        rows = x.reshape(*lead, self.packing.inputs)
        return jax.lax.dot_general(rows, w, (((rows.ndim - 1,), (w.ndim - 1,)), ((), ())))
