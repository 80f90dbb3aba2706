"""The matmul with N:M sparse weights as a kernel for Hopper GPUs; see `Narrow`.

What is kept is read, and multiplied as if it were dense: for each of the four places of an input,
the numbers that stood there, or 0, times the inputs of that place. They are chosen in registers, so
that nothing but what is kept goes through shared memory.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int8

from colossax.pallas.mosaic import WARPGROUP_ROWS, matrix, stage_barriers, why_not_hardware
from colossax.pallas.mosaic import why_slow as why_slow
from colossax.pallas.narrow.kernel import COMPUTING, Narrow, rows_filled
from colossax.pallas.target import Target

from .spec import FOUR, SparseSpec

FOURS = 64
"""Of a step, for each output."""

STAGES = 3


def why_not(spec: SparseSpec, target: Target) -> str | None:
    """The first thing about this call that the kernel cannot do."""
    return why_not_hardware(target) or why_not_call(spec)


def why_not_call(spec: SparseSpec) -> str | None:
    """The same, the hardware aside."""
    if spec.inputs % (FOUR * FOURS):
        return f"{spec.inputs} inputs are no multiple of {FOUR * FOURS}"
    return spec.why_not_narrow()


def multiply(
    x: Float[Array, "m k"],
    values: Float[Array, "a n q"],
    index: Int8[Array, "a n q"],
    *,
    parts: int | None = None,
    interpret: bool = False,
) -> Float[Array, "m n"]:
    """`sparse_matmul`; float32.

    Args:
        x: At most `MOST_ROWS` rows of bfloat16.
        values: See `sparse_matmul`; of bfloat16.
        index: See there.
        parts: Into how many the inputs are cut, each summed by a block of its own; None: as many as
            keep the multiprocessors busy.
        interpret: Whether to run it on the CPU.

    Cost: 2 m' k n FLOPs for m' rows, m rounded up to 8; weights are read once, x from the L2 cache
    for each 128 outputs; sums of parts: `Narrow.run`.
    """
    (m, k), (kept, n, _) = x.shape, values.shape
    x = rows_filled(x)
    places = jnp.moveaxis(x.reshape(len(x), k // FOUR, FOUR), 2, 0)
    more = {"stages": STAGES, "kept": kept}
    kernel = _Kernel.of(m, k // (FOUR * FOURS), n, parts, interpret, **more)
    with jax.named_scope("sparse_matmul_kernel"):
        return kernel.run(kernel.body, kernel.scratch(), n, places, values, index)[:m]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Kernel(Narrow):
    """What its code depends on."""

    kept: int

    def scratch(self) -> dict[str, Any]:
        """Shared memory of a block."""
        copies = self.kept * COMPUTING
        kept = (STAGES, copies, WARPGROUP_ROWS, FOURS)
        return {
            "x": matrix((STAGES, FOUR, self.rows, FOURS), jnp.bfloat16),
            "values": matrix(kept, jnp.bfloat16),
            "index": matrix(kept, jnp.int8),
            "stages": stage_barriers(STAGES, copies=FOUR + 2 * copies, readers=COMPUTING),
        }

    def body(self, x, values, index, out, shared):
        def sources(step, column):
            fours = pl.ds(step * FOURS, FOURS)

            def of_outputs(array):
                return [
                    array.at[at, pl.ds(column + w * WARPGROUP_ROWS, WARPGROUP_ROWS), fours]
                    for w in range(COMPUTING)
                    for at in range(self.kept)
                ]

            places = [x.at[place, :, fours] for place in range(FOUR)]
            return {"x": places, "values": of_outputs(values), "index": of_outputs(index)}

        self.block(shared, out, sources, functools.partial(self.step, shared))

    def step(self, shared, stages, wg, i, total):
        """With the product of each place."""
        slot = stages.arrived(i)
        kept = [
            tuple(shared[name].at[slot, wg * self.kept + at][...] for name in ("values", "index"))
            for at in range(self.kept)
        ]
        pairs = ((_of_place(kept, place), shared["x"].at[slot, place]) for place in range(FOUR))
        total = self.ops.accumulate_all(total, *pairs, transpose_b=True)
        plgpu.commit_smem()  # read before the next copy writes
        stages.leave(i)
        return total


def _of_place(kept: list[tuple[Array, Array]], place: int) -> Array:
    """Numbers that stood at a place of their four, or 0."""
    found = jnp.zeros_like(kept[0][0])
    for values, index in kept:
        found = jnp.where(index == place, values, found)
    return found
