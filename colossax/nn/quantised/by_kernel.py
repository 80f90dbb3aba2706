"""Packed weights multiplied by kernels, where `auto` takes these."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from jaxtyping import Array, Float

from colossax.nn.quantised.coded import whole_part
from colossax.nn.quantised.codes import Packing
from colossax.nn.quantised.forms import Form
from colossax.pallas import int4_matmul, sparse_matmul
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
    if packing.group != int4_matmul.GROUP:
        return None
    spec = functools.partial(int4_matmul.Int4Spec, zeros="zeros" in parts)
    kernel = (spec, int4_matmul.choose, _grouped_local)
    return _product(packing, parts, x, kernel, implementation, inputs_at=0)


def sparse_product(
    packing: Packing,
    parts: Mapping[str, Array],
    x: Float[Array, "*lead_and_in"],
    *,
    implementation: str = "auto",
) -> Array | None:
    """`x` times a sparse matrix, or None where the plain form is to compute it.

    Arguments, result and refusals are those of `grouped_product`, of `sparse_matmul`.
    """
    spec = functools.partial(sparse_matmul.SparseSpec, kept=Form(packing.form).kept)
    kernel = (spec, sparse_matmul.choose, _sparse_local)
    return _product(packing, parts, x, kernel, implementation, inputs_at=-1)


_Kernel = tuple[Callable[..., Any], Callable[..., str], Callable[..., Array]]
"""What makes the facts of a call, what chooses by them, and what a device does."""


def _product(
    packing: Packing,
    parts: Mapping[str, Array],
    x: Array,
    kernel: _Kernel,
    implementation: str,
    inputs_at: int,
) -> Array | None:
    """By a kernel, or None."""
    spec_of, choose, local = kernel
    shapes = {name: part.shape for name, part in parts.items()}
    dims = packing.part_dims()[next(iter(parts))]
    layout = packed_layout(shapes, dims, inputs_at=inputs_at, outputs=len(packing.outs))
    if layout is None:
        return None
    lead, (of_inputs, of_outputs) = x.shape[: x.ndim - packing.contract], layout.shares()
    rows = math.prod(lead)
    spec = spec_of(
        rows=rows,
        inputs=packing.inputs // of_inputs,
        outputs=math.prod(packing.outs) // of_outputs,
        dtype=x.dtype,
        checked=varies((x, dict(parts))),
    )
    chosen = choose(spec, current_target(), implementation)
    if chosen == "xla" and implementation == "auto":
        return None
    whole = {name: whole_part(packing, name, part) for name, part in parts.items()}
    flat = x.reshape(rows, packing.inputs)
    y = layout.product(functools.partial(local, chosen), flat, whole)
    return y.reshape(*lead, *packing.outs)


def _grouped_local(implementation: str, x: Array, parts: Mapping[str, Array]) -> Array:
    """Of what a device holds of the matrix."""
    flat = {name: part.reshape(part.shape[0], -1) for name, part in parts.items()}
    y = int4_matmul.int4_matmul(x, **flat, implementation=implementation)
    return y.reshape(len(x), *parts["codes"].shape[1:])


def _sparse_local(implementation: str, x: Array, parts: Mapping[str, Array]) -> Array:
    """Likewise."""
    kept, *outs, fours = parts["values"].shape
    flat = {name: part.reshape(kept, -1, fours) for name, part in parts.items()}
    y = sparse_matmul.sparse_matmul(x, **flat, implementation=implementation)
    return y.reshape(len(x), *outs)
