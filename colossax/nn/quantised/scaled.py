"""A matrix in codes of eight bits that is multiplied as it is; scales multiply the product."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array

from colossax.nn.quantised.coded import CodedWeight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScaledWeight(CodedWeight):
    """Codes with a scale for each output: `(x @ codes) * scales`. For inference, without gradients.

    Codes are whole in the compute dtype (8 bits in the 8 of bfloat16's mantissa), so the product is
    that of the matrix that they stand for, up to rounding. With scales on the codes' side compilers
    write the matrix in the compute dtype before they multiply.

    Inputs that are kept as they are add their own product, of a narrow matrix. So a feature that is
    far larger than others, as a few of large models always are, meets no rounded number.
    Source: Dettmers et al. 2022, LLM.int8(); of which inputs are chosen beforehand here.

    Attributes:
        parts: `codes`, split as the matrix, and `scales`, split as an output; at rest. With
            outliers `columns`, whole, and `kept`, split as an output.
        packing: How; `int8` or `fp8`.

    Cost: a byte for each number at rest, and read once where few tokens are multiplied:
    tests/aot/test_serving_weights.py counts.
    """

    def product(self, x: Array) -> Array:
        """See `CodedWeight`; no matrix is made."""
        contract, outs = self.packing.contract, self.packing.outs
        lead = x.shape[: x.ndim - contract]
        codes = self.whole("codes").astype(x.dtype)
        # Sums of codes are too large for float16.
        wide = jnp.float32 if x.dtype == jnp.float16 else x.dtype
        rows = x.reshape(*lead, self.packing.inputs)
        y = jnp.dot(
            rows,
            codes.reshape(self.packing.inputs, math.prod(outs)),
            preferred_element_type=wide,
        )
        y = y.astype(jnp.float32) * self.whole("scales").reshape(-1)
        if self.packing.outliers:
            kept = self.whole("kept").astype(x.dtype).reshape(self.packing.outliers, -1)
            beside = jnp.take(rows, self.whole("columns"), axis=-1)
            y = y + jnp.dot(beside, kept, preferred_element_type=jnp.float32)
        return y.astype(x.dtype).reshape(*lead, *outs)
