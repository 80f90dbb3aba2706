"""Codes as a quantised folder has them, and the numbers that they stand for, bit for bit."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from colossax.typing import Dims

CODES, SCALES, ZEROS, GROUPS = "codes", "scales", "zeros", "groups"

_HALF_A_BYTE = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """Where the numbers of a matrix lie: `(code - zero) * scale`, as the type of scales has it.

    Attributes:
        bits: Of a code: 4, two neighbouring inputs in a byte, the earlier one in its low bits; or
            8.
        floats: Whether codes are floats (e4m3) and not whole numbers from 0 on.
        scales: Type of the scales, which numbers were rounded to: `float16`, `bfloat16` or
            `float32`.
        groups: How many groups inputs are in, each with a scale for each output; 1: all are in one.
        zeros: Whether groups have zeros of their own; else `middle` is that of all.
        ordered: Whether it is said which group an input is in; else neighbours share one.
        split: Whether devices that split the inputs split the groups too.
    """

    bits: int
    floats: bool = False
    scales: str
    groups: int
    zeros: bool = False
    ordered: bool = False
    split: bool = False

    @property
    def middle(self) -> int:
        """The code that stands for 0 where there are no zeros of groups."""
        return 0 if self.floats else 2 ** (self.bits - 1)

    @property
    def codes_a_byte(self) -> int:
        """How many share one."""
        return 8 // self.bits

    def parts(
        self, inputs: int, outs: Sequence[int]
    ) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Shape and type of what is kept of a matrix, by name.

        Args:
            inputs: Numbers of an input.
            outs: Sizes of an output.
        """
        codes = jnp.float8_e4m3fn if self.floats else jnp.uint8
        found: dict[str, tuple[tuple[int, ...], np.dtype]] = {
            CODES: ((inputs // self.codes_a_byte, *outs), np.dtype(codes)),
            SCALES: ((self.groups, *outs), jnp.dtype(self.scales)),
        }
        if self.zeros:
            zeros = np.int8 if self.floats else np.uint8
            found[ZEROS] = ((self.groups, *outs), np.dtype(zeros))
        if self.ordered:
            found[GROUPS] = ((inputs,), np.dtype(np.int32))
        return found

    def dims(self, first: str | None, outs: Dims) -> dict[str, Dims]:
        """Logical names of what is kept; `first` is of the input."""
        of_groups = (first if self.split else None, *outs)
        found: dict[str, Dims] = {CODES: (first, *outs), SCALES: of_groups}
        if self.zeros:
            found[ZEROS] = of_groups
        if self.ordered:
            found[GROUPS] = (first,)
        return found


def of_grid(grid: Grid, parts: Mapping[str, Array], dtype: jnp.dtype) -> Float[Array, "k *outs"]:
    """The matrix: computed in float32, rounded to the type of the scales, and then to `dtype`."""
    codes = parts[CODES]
    if grid.bits == _HALF_A_BYTE:
        pairs = jnp.stack([codes & 15, codes >> 4], axis=1)
        codes = pairs.reshape(-1, *codes.shape[1:])
    whole = codes.shape
    if not grid.ordered:
        codes = codes.reshape(grid.groups, -1, *whole[1:])
    values = codes.astype(jnp.float32) - _of_inputs(grid, parts, ZEROS, grid.middle)
    values = values * _of_inputs(grid, parts, SCALES)
    return _rounded(values, grid.scales).astype(dtype).reshape(whole)


def _of_inputs(
    grid: Grid, parts: Mapping[str, Array], name: str, default: int = 0
) -> Float[Array, "..."]:
    """What an input's group has, shaped to meet codes; `default` where no group has its own."""
    if name not in parts:
        return jnp.float32(default)
    of = parts[name]
    found = jnp.take(of, parts[GROUPS], axis=0) if grid.ordered else of[:, None]
    return found.astype(jnp.float32)


def _rounded(x: Float[Array, "..."], scales: str) -> Float[Array, "..."]:
    """Float32 as a narrower type has it, which no compiler may leave out as it may a cast.

    Of float16 numbers below its least normal one are left: each is a whole number times a scale,
    so it has as few bits as the scale.
    """
    info = jnp.finfo(scales)
    if info.bits == 32:
        return x
    found = jax.lax.reduce_precision(x, info.nexp, info.nmant)
    if scales != "float16":
        return found
    return jnp.where(jnp.abs(x) < jnp.float32(info.smallest_normal), x, found)
