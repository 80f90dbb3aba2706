"""The matmul with weights of four bits as a kernel for Hopper GPUs; see `Narrow`.

A step is a group of inputs. The halves of the bytes are made numbers in shared memory, apart: the
low ones times the even inputs, the high ones times the odd ones, so that no code changes its place.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, UInt8

from colossax.pallas.mosaic import (
    WARPGROUP_ROWS,
    matrix,
    spread,
    stage_barriers,
    vector,
    why_not_hardware,
)
from colossax.pallas.mosaic import why_slow as why_slow
from colossax.pallas.narrow.kernel import COMPUTING, Narrow, rows_filled
from colossax.pallas.narrow.spec import COLUMNS, MOST_ROWS
from colossax.pallas.target import Target

from .spec import CODES_A_BYTE, GROUP, ZERO, Int4Spec

DEPTH = GROUP // CODES_A_BYTE
"""Bytes of a group for each output."""

STAGES = 4

_BASE_BITS, _BASE = 0x4300, 128
"""A bfloat16 of these bits is 128, and one more for each that is added to its last bits."""


def why_not(spec: Int4Spec, target: Target) -> str | None:
    """The first thing about this call that the kernel cannot do."""
    return why_not_hardware(target) or why_not_call(spec)


def why_not_call(spec: Int4Spec) -> str | None:
    """The same, the hardware aside."""
    return spec.why_not_narrow()


def multiply(
    x: Float[Array, "m k"],
    codes: UInt8[Array, "_ n"],
    scales: Float[Array, "c n"],
    zeros: UInt8[Array, "c n"] | None,
    *,
    parts: int | None = None,
    interpret: bool = False,
) -> Float[Array, "m n"]:
    """`int4_matmul`; float32.

    Args:
        x: At most `MOST_ROWS` rows of bfloat16.
        codes: See `int4_matmul`.
        scales: See there.
        zeros: See there.
        parts: Into how many the groups are cut, each summed by a block of its own; None: as many as
            keep the multiprocessors busy.
        interpret: Whether to run it on the CPU.

    Cost: 2 m' k n FLOPs for m' rows, m rounded up to 8; weights are read once, x from the L2 cache
    for each 128 outputs; sums of parts: `Narrow.run`.
    """
    (m, k), (groups, n) = x.shape, scales.shape
    x = rows_filled(x)
    halves = x.reshape(len(x), k // CODES_A_BYTE, CODES_A_BYTE)
    sums = jnp.sum(x.reshape(len(x), groups, GROUP).astype(jnp.float32), axis=2).T
    # No copy is of fewer bytes than threads.
    sums = jnp.pad(sums, ((0, 0), (0, MOST_ROWS - len(x))))
    more = {"stages": STAGES, "zeros": zeros is not None}
    kernel = _Kernel.of(m, groups, n, parts, interpret, **more)
    given = (halves[..., 0], halves[..., 1], sums, codes, scales)
    given = given if zeros is None else (*given, zeros)
    with jax.named_scope("int4_matmul_kernel"):
        return kernel.run(kernel.body, kernel.scratch(scales.dtype), n, *given)[:m]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Kernel(Narrow):
    """What its code depends on."""

    zeros: bool

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """Shared memory of a block."""
        inputs = matrix((STAGES, self.rows, DEPTH), jnp.bfloat16)
        scratch = {
            "even": inputs,
            "odd": inputs,
            "sums": vector((STAGES, MOST_ROWS)),
            "codes": matrix((STAGES, COMPUTING, DEPTH, WARPGROUP_ROWS), jnp.uint8),
            "scales": vector((STAGES, COLUMNS), dtype),
            "numbers": matrix((COMPUTING, CODES_A_BYTE, DEPTH, WARPGROUP_ROWS), jnp.bfloat16),
            "stages": stage_barriers(STAGES, copies=4 + COMPUTING + self.zeros, readers=COMPUTING),
        }
        if self.zeros:
            scratch["zeros"] = vector((STAGES, COLUMNS), jnp.uint8)
        return scratch

    def body(self, even, odd, sums, codes, scales, *rest):
        *zeros, out, shared = rest

        def sources(group, column):
            of_group, columns = pl.ds(group * DEPTH, DEPTH), pl.ds(column, COLUMNS)
            halves = [
                codes.at[of_group, pl.ds(column + w * WARPGROUP_ROWS, WARPGROUP_ROWS)]
                for w in range(COMPUTING)
            ]
            of_rows = {"even": even.at[:, of_group], "odd": odd.at[:, of_group]}
            of_columns = {"scales": scales.at[group, columns]}
            if self.zeros:
                of_columns["zeros"] = zeros[0].at[group, columns]
            return {"codes": halves, **of_rows, "sums": sums.at[group], **of_columns}

        self.block(shared, out, sources, functools.partial(self.step, shared))

    def step(self, shared, stages, wg, i, total):
        """One group: its product, less what the zeros add to it, times its scales."""
        slot = stages.arrived(i)
        mine = pl.ds(wg * WARPGROUP_ROWS, WARPGROUP_ROWS)
        codes = shared["codes"].at[slot, wg][...].astype(jnp.uint16)
        low, high = (shared["numbers"].at[wg, half] for half in range(CODES_A_BYTE))
        low[...] = _numbers(codes & jnp.uint16(15))
        high[...] = _numbers(codes >> jnp.uint16(4))
        plgpu.commit_smem()
        pairs = ((low, shared["even"].at[slot]), (high, shared["odd"].at[slot]))
        product: Any = self.ops.sum_of_transposed(*pairs)
        sums = self.ops.vector(shared["sums"].at[slot, pl.ds(0, self.rows)], along=1)
        sums = spread(sums, product.shape, along=1)
        zero: Any = float(ZERO)
        if self.zeros:
            zero = self.ops.vector(shared["zeros"].at[slot, mine]).astype(jnp.float32)
            zero = spread(zero, product.shape)
        scales = self.ops.vector(shared["scales"].at[slot, mine]).astype(jnp.float32)
        total = total + (product - zero * sums) * spread(scales, product.shape)
        plgpu.commit_smem()  # read before the next copy writes
        stages.leave(i)
        return total


def _numbers(codes: Array) -> Array:
    """Codes as bfloat16, without a conversion: there are few units for these."""
    bits = codes | jnp.uint16(_BASE_BITS)
    return jax.lax.bitcast_convert_type(bits, jnp.bfloat16) - jnp.bfloat16(_BASE)
