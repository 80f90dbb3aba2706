"""Starting a kernel, and the shared memory of one."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
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
    in_place: bool = False,
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
        in_place: Whether outputs take the memory of the last inputs, one for one: in a loop that
            carries them nothing is copied. Every item is read before it is written, by one block.
            So it is in the interpreter too; under `vmap` alone they are apart.
    """
    where: dict[str, Any] = {
        "grid": tuple(grid.values()),
        "grid_names": tuple(grid),
        "num_threads": warpgroups,
        "thread_name": "wg",
    }
    how: dict[str, Any] = {
        "compiler_params": plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        )
    }
    if interpret:
        how["interpret"] = interpreter()
    scratch = [dict(scratch)] if isinstance(scratch, Mapping) else list(scratch)
    run = plgpu.kernel(body, out_type=out, scratch_types=scratch, **where, **how)

    def apart(*arrays: Any) -> tuple[Any, ...]:
        return tuple(run(*arrays))

    if in_place:
        return _in_place(body, len(out), scratch, where, how, apart)
    return apart


def _in_place(
    body: Callable[..., None],
    outputs: int,
    scratch: Sequence[Any],
    where: Mapping[str, Any],
    how: Mapping[str, Any],
    apart: Callable[..., Any],
) -> Callable[..., Any]:
    """The same kernel, whose last inputs are its outputs; under `vmap` it is `apart`."""

    def with_scratch(*refs: Any) -> None:
        pl.run_scoped(
            lambda *shared: body(*refs, *refs[-outputs:], *shared), *scratch, collective_axes="wg"
        )

    def update(refs: Any) -> None:
        given = (ref[...] for ref in refs[:-outputs])
        mesh, name = plgpu.Mesh(**where), getattr(body, "__name__", None)
        kernel = pl.kernel(with_scratch, out_type=(), mesh=mesh, name=name, **how)
        kernel(*given, *refs[-outputs:])

    @jax.custom_batching.custom_vmap
    def run(*arrays: Any) -> tuple[Any, ...]:
        return tuple(pl.run_state(update)(arrays)[-outputs:])

    @run.def_vmap
    def _apart(size: int, batched: Any, *arrays: Any) -> tuple[Any, Any]:
        axes = [0 if one else None for one in batched]
        return jax.vmap(apart, axes, axis_size=size)(*arrays), (True,) * outputs

    return run


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
    arrays = (x for x in jax.tree.leaves(scratch) if not isinstance(x, plgpu.Barrier))
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in arrays)
