"""Packed weights multiplied by kernels, where `auto` takes these."""

import functools
import math
from collections.abc import Mapping

from jaxtyping import Array, Float

from colossax.nn.quantised.coded import whole_part
from colossax.nn.quantised.codes import Packing
from colossax.pallas import int4_matmul
from colossax.pallas.target import current_target
from colossax.pallas.varying import varies
from colossax.sharding.matmul import packed_layout


def grouped_product(
    packing: Packing,
    parts: Mapping[str, Array],
    x: Float[Array, "*lead_and_in"],
    *,
    implementation: str = "auto",
) -> Array | None:
    """`x` times a matrix in groups of four bits, or None where the plain form is to compute it.

    Args:
        packing: How it is kept.
        parts: What is kept of it, at rest.
        x: `[*lead, *in]`.
        implementation: Of `int4_matmul`; `auto`: its kernel or, in its place, None.

    Returns:
        `[*lead, *outs]` in the dtype of `x`.

    Raises:
        NotImplementedError: The implementation named does not take this call, says why.

    Cost: that of `int4_matmul`, on each device for what it holds; see `PackedLayout.product`.
    """
    dims = packing.part_dims()["codes"]
    shapes = {name: part.shape for name, part in parts.items()}
    layout = packed_layout(shapes, dims, inputs_at=0, outputs_at=slice(1, None))
    if packing.group != int4_matmul.GROUP or layout is None:
        return None
    lead, (of_inputs, of_outputs) = x.shape[: x.ndim - packing.contract], layout.shares()
    spec = int4_matmul.Int4Spec(
        rows=math.prod(lead),
        inputs=packing.inputs // of_inputs,
        outputs=math.prod(packing.outs) // of_outputs,
        dtype=x.dtype,
        zeros="zeros" in parts,
        checked=varies((x, dict(parts))),
    )
    chosen = int4_matmul.choose(spec, current_target(), implementation)
    if chosen == "xla" and implementation == "auto":
        return None
    multiply = functools.partial(_grouped_local, chosen)
    whole = {name: whole_part(packing, name, part) for name, part in parts.items()}
    y = layout.product(multiply, x.reshape(spec.rows, packing.inputs), whole)
    return y.reshape(*lead, *packing.outs)


def _grouped_local(implementation: str, x: Array, parts: Mapping[str, Array]) -> Array:
    """Of what a device holds of the matrix."""
    flat = {name: part.reshape(part.shape[0], -1) for name, part in parts.items()}
    y = int4_matmul.int4_matmul(x, **flat, implementation=implementation)
    return y.reshape(len(x), *parts["codes"].shape[1:])
