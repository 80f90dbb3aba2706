"""Codes of matrices: what is kept of one, made and read back."""

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from colossax.errors import InputError
from colossax.nn.quantised.forms import IN_GROUPS, SPARSE, Form
from colossax.nn.quantised.grid import Grid, of_grid
from colossax.nn.quantised.groups import in_groups, of_groups
from colossax.nn.quantised.sparse import expanded, pruned
from colossax.pallas.sparse_matmul import FOUR
from colossax.typing import Dims

BLOCK = 64
"""Inputs that share a scale in NF4."""

SCALES_BLOCK = 256
"""Scales that share one of their own where they are in eight bits."""

LEVELS = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)
"""What the codes of NF4 stand for: quantiles of the normal distribution, 0 one of them.

Source: appendix E of Dettmers et al. 2023, QLoRA.
"""

_MIDDLES = (LEVELS[1:] + LEVELS[:-1]) / 2

_LARGEST = 127

_EIGHT_BITS = {"int8": (jnp.int8, _LARGEST), "fp8": (jnp.float8_e4m3fn, 448)}
"""Forms with a scale for each output: type of the codes, and the largest of them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packing:
    """How a matrix is kept in codes.

    Attributes:
        form: `nf4`: four bits for each number, two neighbours among the inputs to a byte, the
            earlier one in its high bits; a scale, the largest absolute value, for each `BLOCK`
            inputs of an output. `int8`: eight bits, and a scale for each output. `fp8`: likewise,
            codes are floats of four bits of exponent and three of mantissa (e4m3). `int4`,
            `int4-sym`: see `in_groups`. `2:4`, `1:4`: no codes, see `pruned`. `kept`: see `grid`.
        double: Of `nf4`: scales less their mean are in eight bits too, with a scale for each
            `SCALES_BLOCK` outputs.
        shape: Of the matrix, `[*in, *out]`, or of several, `[*apart, *in, *out]`.
        dims: Its logical names.
        contract: How many of them are of the input.
        apart: How many in front number matrices that are apart, as those of experts.
        group: Of `int4` and `int4-sym`, inputs that share a scale; of `kept`, where these are codes
            as of `int4`.
        outliers: Of `int8` and `fp8`, how many inputs are kept as they are, beside the codes.
        grid: Of `kept`, what its codes are.
    """

    form: str
    double: bool
    shape: tuple[int, ...]
    dims: Dims
    contract: int
    apart: int = 0
    group: int = 0
    outliers: int = 0
    grid: Grid | None = None

    @property
    def input_axes(self) -> tuple[int, ...]:
        """Which dims are of the input."""
        return tuple(range(self.apart, self.apart + self.contract))

    @property
    def inputs(self) -> int:
        """Numbers of an input."""
        return math.prod(self.shape[at] for at in self.input_axes)

    @property
    def outs(self) -> tuple[int, ...]:
        """Sizes of an output."""
        return self.shape[self.apart + self.contract :]

    def part_dims(self) -> dict[str, Dims]:
        """Logical names of what is kept; several dims of the input are one, called as the first."""
        outs = self.dims[self.apart + self.contract :]
        if self.grid is not None:
            return self.grid.dims(self.dims[0], outs)
        if self.form in _EIGHT_BITS:
            beside = {"columns": (None,), "kept": (None, *outs)} if self.outliers else {}
            return {"codes": self.dims, "scales": (*self.dims[: self.apart], *outs)} | beside
        if self.form in SPARSE:
            return dict.fromkeys(("values", "index"), (None, *outs, self.dims[0]))
        blocked = (self.dims[0], *outs)
        if self.form in IN_GROUPS:
            names = ("codes", "scales", *(() if self.form == "int4-sym" else ("zeros",)))
            return dict.fromkeys(names, blocked)
        own: dict[str, Dims] = {"codes": blocked, "scales": blocked}
        # Steps are few: whole along the output, they forbid none of its splits.
        return own | ({"steps": (self.dims[0], None), "mean": ()} if self.double else {})

    def check(self, name: str, asked: str) -> None:
        """Refuse a matrix that blocks do not divide.

        Args:
            name: Of the matrix.
            asked: The setting that asks for the form.

        Raises:
            InputError: Names it, and what would work.
        """
        if self.form == "nf4" and self.inputs % BLOCK:
            raise InputError(
                f"{asked}: nf4 keeps blocks of {BLOCK} inputs, and '{name}' has {self.inputs};"
                f" give {asked} int8 or own"
            )
        if self.outliers > self.inputs:
            raise InputError(
                f"outliers: {self.outliers} inputs of each map are to be kept as they are, and"
                f" '{name}' has {self.inputs}; find fewer"
            )
        if self.form in IN_GROUPS and self.inputs % self.group:
            raise InputError(
                f"{asked}: int4 keeps groups of {self.group} inputs, and '{name}' has"
                f" {self.inputs}; give {self.form}:G with a G that divides them, int8 or own"
            )
        if self.form in SPARSE and self.shape[self.contract - 1] % FOUR:
            raise InputError(
                f"{asked}: {self.form} keeps some of each {FOUR} inputs, and '{name}' has"
                f" {self.shape[self.contract - 1]} side by side; give int8 or own"
            )
        if self.double and math.prod(self.outs) % SCALES_BLOCK:
            raise InputError(
                f"adapter.double: scales are kept in blocks of {SCALES_BLOCK} outputs, and '{name}'"
                f" has {math.prod(self.outs)}; give adapter.double false"
            )


@dataclasses.dataclass(frozen=True)
class Part:
    """One of the arrays that a matrix is kept in.

    Attributes:
        name: `codes`, `scales`, `zeros`, `groups`, `steps` or `mean`; of sparse ones `values` or
            `index`; of inputs that are kept as they are `columns`, their numbers, and `kept`.
        of: The matrix.
    """

    name: str
    of: Packing

    @property
    def numbers(self) -> int:
        """Numbers of the matrix that it stands for: codes for each one, others for none."""
        return math.prod(self.of.shape) if self.name in ("codes", "values") else 0

    @property
    def as_the_matrix(self) -> bool:
        """Whether it is of the type that the matrix would have at rest."""
        return self.name in ("values", "kept")


def quantise(
    packing: Packing, w: Float[Array, "*in_and_out"], columns: Int[Array, " c"] | None = None
) -> dict[str, Array]:
    """What is kept of a matrix, by name.

    NF4 takes the nearest level, of two that are as near the lower one; others round to even.

    Args:
        packing: How.
        w: In any floating type; computed in float32.
        columns: Which inputs are kept as they are, where some are; default the first ones.
    """
    if packing.form in SPARSE:
        kept = Form(packing.form).kept
        return pruned(w.reshape(packing.inputs, -1), packing.outs, kept=kept)
    w = w.astype(jnp.float32)
    if packing.form in IN_GROUPS:
        rows, zeros = w.reshape(packing.inputs, -1), packing.form != "int4-sym"
        return in_groups(rows, packing.outs, group=packing.group, zeros=zeros)
    if packing.form in _EIGHT_BITS:
        w, beside = _without_outliers(packing, w, columns)
        codes, scales = _in_eight_bits(w, packing.input_axes, packing.form)
        return {"codes": codes, "scales": scales, **beside}
    blocks = w.reshape(-1, BLOCK, *packing.outs)
    scales = jnp.max(jnp.abs(blocks), axis=1)
    codes = _nearest(blocks / jnp.where(scales > 0, scales, 1)[:, None])
    pairs = codes.reshape(-1, 2, *packing.outs)
    found = {"codes": pairs[:, 0] << 4 | pairs[:, 1], "scales": scales}
    return found | (_scales_in_codes(scales) if packing.double else {})


def dequantise(
    packing: Packing, parts: Mapping[str, Array], dtype: jnp.dtype
) -> Float[Array, "*in_and_out"]:
    """The matrix that is kept, computed in float32 and rounded once."""
    if packing.grid is not None:
        return of_grid(packing.grid, parts, dtype).reshape(packing.shape)
    if packing.form in SPARSE:
        return jnp.moveaxis(expanded(parts, dtype), -1, 0).reshape(packing.shape)
    if packing.form in IN_GROUPS:
        made = of_groups(parts, packing.outs, group=packing.group, dtype=dtype)
        return made.reshape(packing.shape)
    codes = parts["codes"]
    if packing.form in _EIGHT_BITS:
        scales = jnp.expand_dims(parts["scales"], packing.input_axes)
        w = (codes.astype(jnp.float32) * scales).astype(dtype)
        if not packing.outliers:
            return w
        rows = w.reshape(packing.inputs, *packing.outs).at[parts["columns"]]
        return rows.set(parts["kept"].astype(dtype)).reshape(packing.shape)
    scales = parts["scales"]
    if packing.double:
        blocks = scales.astype(jnp.float32).reshape(*parts["steps"].shape, SCALES_BLOCK)
        scales = (blocks * parts["steps"][..., None]).reshape(scales.shape) + parts["mean"]
    pairs = jnp.stack([codes >> 4, codes & 15], axis=1)
    values = jnp.asarray(LEVELS)[pairs].reshape(-1, BLOCK, *packing.outs)
    return (values * scales[:, None]).astype(dtype).reshape(packing.shape)


def _without_outliers(
    packing: Packing, w: Array, columns: Array | None
) -> tuple[Array, dict[str, Array]]:
    """The matrix with zeros where inputs are kept, so that scales do not reach for these; and they.

    Without any the matrix as it is.
    """
    if not packing.outliers:
        return w, {}
    columns = jnp.arange(packing.outliers) if columns is None else columns
    rows = w.reshape(packing.inputs, *packing.outs)
    beside = {"columns": columns.astype(jnp.int32), "kept": rows[columns]}
    return rows.at[columns].set(0).reshape(w.shape), beside


def _nearest(x: Array) -> Array:
    """Codes of the nearest levels; a comparison at a time keeps no array wider than `x`."""
    above = ((x > middle).astype(jnp.uint8) for middle in _MIDDLES)
    return sum(above, jnp.zeros(x.shape, jnp.uint8))


def _in_eight_bits(x: Array, axes: tuple[int, ...], form: str = "int8") -> tuple[Array, Array]:
    """Codes, and what 1 of them stands for, which numbers along some dims share."""
    dtype, largest = _EIGHT_BITS[form]
    # Multiplied, not divided: of a division by a constant compilers make either.
    steps = jnp.max(jnp.abs(x), axis=axes) * jnp.float32(1 / largest)
    spread = jnp.expand_dims(jnp.where(steps > 0, steps, 1), axes)
    codes = x / spread
    if form == "int8":
        codes = jnp.round(codes)
    return jnp.clip(codes, -largest, largest).astype(dtype), steps


def _scales_in_codes(scales: Array) -> dict[str, Array]:
    """Scales less their mean; 8-bit integers where the paper has 8-bit floats.

    The mean has eight bits, so that the order in which devices sum it up changes no code.
    """
    mean = jax.lax.reduce_precision(jnp.mean(scales), 8, 7)
    blocks = (scales - mean).reshape(scales.shape[0], -1, SCALES_BLOCK)
    codes, steps = _in_eight_bits(blocks, (2,))
    return {"scales": codes.reshape(scales.shape), "steps": steps, "mean": mean}


quantised = jax.jit(quantise, static_argnums=0)
"""`quantise`, compiled once for matrices that are alike."""
