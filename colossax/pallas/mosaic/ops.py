"""What differs between hardware and the interpreter, so that a kernel is written once."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from colossax.compat import load_laid_out, store_plain, transposed_ref

from .copies import Box

LAYOUT = plgpu.Layout.WGMMA
"""Of a matrix in the registers of one warpgroup, as `wgmma` leaves and takes it."""


@dataclasses.dataclass(frozen=True)
class Ops:
    """Matmuls of one warpgroup, and the layouts of what it holds in registers.

    On hardware these are `wgmma` and conversions between register layouts. The interpreter knows
    neither layouts nor operands in registers; there they are matmuls in float32, followed by the
    fence that `wgmma` implies and that the interpreter's race detector asks for.

    Attributes:
        interpret: Whether the kernel is interpreted.
    """

    interpret: bool

    def copy_in(self, source: Any, target: Any, barrier: Any) -> None:
        """Start a bulk copy of global to shared memory; it arrives at `barrier`.

        To a `matrix` it starts at multiples of 8 rows and of the columns of a swizzle: of any
        other, hardware reads parts as zeros (`copies`), and so does the interpreter.
        """

        def copy() -> None:
            plgpu.copy_gmem_to_smem(source, target, barrier)  # noqa: TID251

        def copy_cut(box: Box) -> None:
            target[...] = jnp.where(box.copied(), source[...], jnp.zeros((), target.dtype))
            plgpu.commit_smem()
            plgpu.barrier_arrive(barrier)

        box = Box.of(source, target) if self.interpret else None
        if box is None:
            copy()
        else:
            jax.lax.cond(box.is_cut(), functools.partial(copy_cut, box), copy)

    def copy_out(self, source: Any, target: Any) -> None:
        """Start a bulk copy of shared to global memory, to where `copy_in` could start.

        Of any other, hardware leaves out parts, and so does the interpreter.
        """

        def copy() -> None:
            plgpu.copy_smem_to_gmem(source, target)  # noqa: TID251

        def copy_cut(box: Box) -> None:
            target[...] = jnp.where(box.copied(), source[...], target[...])

        box = Box.of(target, source) if self.interpret else None
        if box is None:
            copy()
        else:
            jax.lax.cond(box.is_cut(), functools.partial(copy_cut, box), copy)

    def matmul(
        self,
        a: Any,
        b: Any,
        *,
        transpose_b: bool = False,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> jax.Array:
        """`a @ b` (`a @ b.T`) of two matrices in shared memory; float32, in registers.

        `meanwhile` is traced once, to run while the tensor cores multiply.
        """
        if self.interpret:
            product = self._dot(a, b, transpose_b)
            meanwhile()
            return product

        def multiply(acc: Any) -> jax.Array:
            plgpu.wgmma(acc, a, transposed_ref(b) if transpose_b else b)
            meanwhile()
            return acc[...]

        columns = b.shape[0] if transpose_b else b.shape[1]
        return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], columns), jnp.float32))

    def accumulate(self, acc: jax.Array, a: Any, b: Any, *, transpose_b: bool = False) -> jax.Array:
        """`acc + a @ b` (`a @ b.T`): b in shared memory, a there or in registers."""
        return self.accumulate_all(acc, (a, b), transpose_b=transpose_b)

    def accumulate_all(
        self, acc: jax.Array, *pairs: tuple[Any, Any], transpose_b: bool = False
    ) -> jax.Array:
        """`accumulate` of each pair, to one sum, which is waited for once."""
        if self.interpret:
            return functools.reduce(lambda acc, ab: acc + self._dot(*ab, transpose_b), pairs, acc)

        def multiply(ref: Any) -> None:
            for a, b in pairs:
                plgpu.wgmma(ref, a, transposed_ref(b) if transpose_b else b)

        total: Any = pl.run_state(multiply)(plgpu.ACC.init(acc))
        return total

    def matmuls(self, *pairs: tuple[Any, Any], transpose_b: bool = False) -> tuple[jax.Array, ...]:
        """`matmul` of each pair, all started before the first is waited for."""
        if self.interpret:
            return tuple(self._dot(a, b, transpose_b) for a, b in pairs)

        def multiply(*accs: Any) -> tuple[jax.Array, ...]:
            for acc, (a, b) in zip(accs, pairs, strict=True):
                plgpu.wgmma(acc, a, transposed_ref(b) if transpose_b else b)
            return tuple(acc[...] for acc in accs)

        shapes = ((a.shape[0], b.shape[0 if transpose_b else 1]) for a, b in pairs)
        return pl.run_scoped(multiply, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))

    def sum_of_transposed(self, *pairs: tuple[Any, Any]) -> jax.Array:
        """Sum of `a.T @ b.T` over pairs of matrices in shared memory; float32, in registers."""
        if self.interpret:
            products = [self._dot(a, b, True, True) for a, b in pairs]
            return functools.reduce(jnp.add, products)

        def multiply(acc: Any) -> jax.Array:
            for a, b in pairs:
                plgpu.wgmma(acc, transposed_ref(a), transposed_ref(b))
            return acc[...]

        shape = (pairs[0][0].shape[1], pairs[0][1].shape[0])
        return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))

    def accumulates(self, *triples: tuple[jax.Array, Any, Any]) -> tuple[jax.Array, ...]:
        """`accumulate` of each `(acc, a, b)`, all started before the first is waited for."""
        if self.interpret:
            return tuple(acc + self._dot(a, b, False) for acc, a, b in triples)

        def multiply(refs: Any) -> None:
            for ref, (_, a, b) in zip(refs, triples, strict=True):
                plgpu.wgmma(ref, a, b)

        totals: Any = pl.run_state(multiply)(tuple(plgpu.ACC.init(acc) for acc, _, _ in triples))
        return tuple(totals)

    def sum_of_products(
        self,
        shape: tuple[int, int],
        steps: Any,
        operands: Callable[[Any], tuple[Any, Any]],
        release: Callable[[Any], None],
        *,
        transpose_a: bool = False,
        transpose_b: bool = False,
    ) -> jax.Array:
        """Sum of `a @ b` over `steps` pairs of matrices in shared memory; float32, in registers.

        Args:
            shape: Of the sum.
            steps: How many, known when the kernel runs.
            operands: Waits for those of a step and gives references to them.
            release: Says that a step's operands may be overwritten; one product is still under
                way while the next is issued.
            transpose_a: Whether it is `a.T`.
            transpose_b: Whether it is `b.T`.
        """
        if self.interpret:

            def add(i: Any, acc: jax.Array) -> jax.Array:
                total = acc + self._dot(*operands(i), transpose_b, transpose_a)
                release(i)
                return total

            return jax.lax.fori_loop(0, steps, add, jnp.zeros(shape, jnp.float32))

        def multiply(acc: Any) -> jax.Array:
            def issue(i: Any, _: None) -> None:
                a, b = operands(i)
                plgpu.wgmma(
                    acc,
                    transposed_ref(a) if transpose_a else a,
                    transposed_ref(b) if transpose_b else b,
                )
                plgpu.wgmma_wait(1)
                pl.when(i > 0)(lambda: release(i - 1))

            jax.lax.fori_loop(0, steps, issue, None)
            plgpu.wgmma_wait(0)
            pl.when(steps > 0)(lambda: release(steps - 1))
            return acc[...]

        return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))

    def _dot(self, a: Any, b: Any, transpose_b: bool, transpose_a: bool = False) -> jax.Array:
        left = a[...].T if transpose_a else a[...]
        right = b[...].T if transpose_b else b[...]
        product = jnp.dot(left, right, preferred_element_type=jnp.float32)
        plgpu.commit_smem()
        return product

    def full(self, shape: tuple[int, ...], value: float, *, along: int = 0) -> jax.Array:
        """A constant float32 matrix, or vector: per row of a matrix (`along` 0) or column (1)."""
        constant = jnp.full(shape, value, jnp.float32)
        if self.interpret:
            return constant
        return plgpu.layout_cast(constant, LAYOUT if len(shape) == 2 else LAYOUT.reduce(1 - along))

    def iota(self, shape: tuple[int, int], dim: int) -> jax.Array:
        """int32 indices of a matrix along `dim`."""
        if self.interpret:
            return jax.lax.broadcasted_iota(jnp.int32, shape, dim)
        return plgpu.broadcasted_iota(jnp.int32, shape, dim, layout=LAYOUT)

    def store(self, ref: Any, value: jax.Array) -> None:
        """A matrix to shared memory that is no `matrix` (`launch.vector`): slow, any row alone."""
        if self.interpret:
            ref[...] = value
        else:
            store_plain(ref, value)

    def vector(self, ref: Any, *, along: int = 0) -> jax.Array:
        """What shared or global memory holds per row (`along` 0) or column (1) of a matrix."""
        if self.interpret:
            return ref[...]
        return load_laid_out(ref, LAYOUT.reduce(1 - along))

    def plain(self, ref: Any) -> jax.Array:
        """A matrix in global memory, straight into registers: 32 bytes of a row at a time."""
        return ref[...] if self.interpret else load_laid_out(ref, LAYOUT)

    def tile(self, ref: Any) -> jax.Array:
        """A matrix in shared memory as float32 in registers."""
        return ref[...].astype(jnp.float32)


def spread(vector: jax.Array, shape: tuple[int, int], *, along: int = 0) -> jax.Array:
    """A value per row (`along` 0) or column (1) as a whole matrix."""
    return jax.lax.broadcast_in_dim(vector, shape, [along])


def tanh(x: jax.Array) -> jax.Array:
    """The hyperbolic tangent to 3e-7; the instruction of that name knows 11 bits.

    tanh(x) = 1 - 2 / (1 + exp(2 x)), the reciprocal as the square of an inverse root: two
    instructions of the special function unit, and no overflow.
    """
    inverse_root = jax.lax.rsqrt(1 + jnp.exp2(x * (2 * math.log2(math.e))))
    return 1 - 2 * inverse_root * inverse_root
