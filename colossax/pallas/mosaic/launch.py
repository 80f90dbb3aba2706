"""Starting a kernel, and the shared memory of one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from colossax.compat import interpreter

WARPGROUP_ROWS = 64
"""Rows of a matrix that one `wgmma` of one warpgroup multiplies."""

SHARED_BYTES = 227 * 1024
"""Shared memory of a block on compute capability 9.0."""


def launch(
    body: Callable[..., None],
    *,
    out: Any,
    scratch: Sequence[Any] | Mapping[str, Any],
    grid: Mapping[str, int],
    warpgroups: int,
    interpret: bool,
) -> Callable[..., Any]:
    """A function of arrays that runs `body` on every point of `grid`.

    Args:
        body: Takes references to inputs, outputs and scratch. `jax.lax.axis_index` gives places by
            the names of `grid` and, as `wg`, the warpgroup.
        out: Shapes and dtypes of the outputs, a tuple.
        scratch: Shared memory and barriers of each block; by names, `body` takes one dict.
        grid: Names and sizes, the fastest last.
        warpgroups: Of 128 threads each, which run `body` side by side.
        interpret: Whether to interpret it on the CPU, races looked for (`compat.races_found`).
    """
    options = {"interpret": interpreter()} if interpret else {}
    run = plgpu.kernel(
        body,
        out_type=out,
        scratch_types=[dict(scratch)] if isinstance(scratch, Mapping) else list(scratch),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=warpgroups,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        **options,
    )
    return lambda *arrays: tuple(run(*arrays))


def matrix(shape: tuple[int, ...], dtype: Any, *, rows_summed: int = 0) -> Any:
    """Shared memory for matrices `[..., rows, columns]` that `wgmma` can multiply.

    Columns are a multiple of 32 bytes; the widest swizzle that divides them is taken. Where
    a product sums over rows, give their number: it is a multiple of the columns of a swizzle.
    """
    itemsize = jnp.dtype(dtype).itemsize
    sizes = (shape[-1] * itemsize, rows_summed * itemsize)
    swizzle = next(n for n in (128, 64, 32) if all(size % n == 0 for size in sizes))
    return plgpu.SMEM(
        shape,
        dtype,
        transforms=(
            plgpu.TilingTransform((8, swizzle // itemsize)),
            plgpu.SwizzleTransform(swizzle),
        ),
    )


def vector(shape: tuple[int, ...], dtype: Any = jnp.float32) -> Any:
    """Shared memory for plain vectors."""
    return plgpu.SMEM(shape, dtype)


def shared_bytes(scratch: Any) -> int:
    """What the arrays of a scratch take, barriers aside."""
    arrays = (x for x in jax.tree.leaves(scratch) if hasattr(x, "dtype"))
    found = 0
    for x in arrays:
        try:
            itemsize = jnp.dtype(x.dtype).itemsize
        except TypeError:
            continue  # a barrier
        size = itemsize
        for n in x.shape:
            size *= n
        found += size
    return found
