"""Kernels of matmuls of few rows for Hopper GPUs: their blocks, and who does what in one.

Outputs are the rows of a tile, because a tile has 64 of them and the rows of such a matmul are
fewer. A block has 128 outputs and some of the steps along the inputs; one warpgroup copies what
steps need into a ring of stages, two multiply, 64 outputs each.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from colossax.pallas.mosaic import (
    SHARED_BYTES,
    WARPGROUP_ROWS,
    Ops,
    Stages,
    launch,
    multiprocessors,
    shared_bytes,
)

from .spec import COLUMNS, filled

COMPUTING = COLUMNS // WARPGROUP_ROWS
"""Warpgroups that multiply; one more copies."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Narrow:
    """A kernel: what its code depends on.

    Attributes:
        ops: Of the kernel.
        rows: Of the product, filled up.
        steps: Along the inputs, of all blocks together.
        each: How many of them a block has at most.
        stages: Of the ring.
    """

    ops: Ops
    rows: int
    steps: int
    each: int
    stages: int

    @classmethod
    def of(
        cls, rows: int, steps: int, outputs: int, parts: int | None, interpret: bool, **more: Any
    ) -> Any:
        """The kernel for so many rows, whose steps are cut into parts.

        Args:
            rows: As they are.
            steps: See `Narrow`.
            outputs: A multiple of `COLUMNS`.
            parts: Each is summed by a block of its own; None: as many as keep the multiprocessors
                busy.
            interpret: Whether to run it on the CPU.
            more: What else the kernel depends on.
        """
        parts = parts or max(1, math.ceil(multiprocessors() / (outputs // COLUMNS)))
        each = math.ceil(steps / min(steps, parts))
        return cls(ops=Ops(interpret=interpret), rows=filled(rows), steps=steps, each=each, **more)

    def run(
        self, body: Callable[..., None], scratch: Mapping[str, Any], outputs: int, *given: Array
    ) -> Float[Array, "m n"]:
        """All blocks; float32, rows filled up.

        Args:
            body: Takes references to `given`, to the output, and scratch.
            scratch: Of a block, `stages` among it.
            outputs: Of the matmul.
            given: Inputs.

        Cost: `8 m' n` bytes of sums of each part are written and read, for m' rows.
        """
        assert shared_bytes(scratch) <= SHARED_BYTES, self.rows
        parts = math.ceil(self.steps / self.each)
        launched = launch(
            body,
            out=(jax.ShapeDtypeStruct((parts, outputs, self.rows), jnp.float32),),
            scratch=scratch,
            grid={"part": parts, "columns": outputs // COLUMNS},
            warpgroups=COMPUTING + 1,
            interpret=self.ops.interpret,
        )
        (out,) = launched(*given)
        return jnp.sum(out, axis=0).T

    def block(
        self,
        shared: Mapping[str, Any],
        out: Any,
        sources: Callable[[Any, Any], Mapping[str, Any]],
        step: Callable[..., Any],
    ) -> None:
        """A block within a kernel.

        Args:
            shared: Its scratch.
            out: Reference to the output.
            sources: `(step, first output)`: what is copied, see `Stages.fill`.
            step: `(stages, warpgroup, number, sum)`: the sum with one step more.
        """
        part, column = jax.lax.axis_index("part"), jax.lax.axis_index("columns") * COLUMNS
        first = part * self.each
        count = jnp.clip(self.steps - first, 0, self.each)
        stages = Stages(self.ops, shared, shared["stages"], self.stages)
        wg = jax.lax.axis_index("wg")

        @pl.when(wg == COMPUTING)
        def _copy():
            @pl.loop(0, count)
            def _step(i):
                stages.fill(i, sources(first + i, column))

            stages.drain(count)

        @pl.when(wg < COMPUTING)
        def _compute():
            nothing = self.ops.full((WARPGROUP_ROWS, self.rows), 0.0)
            total = jax.lax.fori_loop(0, count, functools.partial(step, stages, wg), nothing)
            mine = pl.ds(column + wg * WARPGROUP_ROWS, WARPGROUP_ROWS)
            out.at[part, mine][...] = total


def rows_filled(x: Float[Array, "m k"]) -> Float[Array, "_ k"]:
    """Rows and zeros behind them, as many as the kernel has."""
    return jnp.pad(x, ((0, filled(len(x)) - len(x)), (0, 0)))
