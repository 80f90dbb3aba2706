"""MXFP4 weights, read as floats: numbers of four bits, a scale for each 32 of them.

A matrix of each expert `[experts, in, out]` is stored as `NAME_blocks` `[experts, out, in / 32,
16]`, two numbers in a byte, the lower bits first, and `NAME_scales` `[experts, out, in / 32]`.
"""

import ml_dtypes
import numpy as np

from colossax.errors import WeightsError
from colossax.models.safetensors import Reader

DTYPE = np.dtype(ml_dtypes.bfloat16)
"""Holds every number exactly whose scale is not at the very ends."""

BLOCKS, SCALES = "_blocks", "_scales"
_GROUP = 32
_BYTES = _GROUP // 2
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.asarray((*_POSITIVE, *(-value for value in _POSITIVE)), np.float32)
_EXPONENT_BIAS = 127


def unpack(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Numbers `[..., groups * 32]` in `DTYPE` of bytes `[..., groups, 16]`, scales `[..., groups]`.

    A byte's numbers are e2m1: a sign, two bits of exponent, one of mantissa. A scale is a power of
    two, e8m0: 127 is 1; the last one is no number.

    Source: Open Compute Project 2023, Microscaling Formats (MX).
    """
    values = np.empty((*blocks.shape[:-1], _GROUP), np.float32)
    values[..., 0::2] = _VALUES[blocks & 0x0F]
    values[..., 1::2] = _VALUES[blocks >> 4]
    exponents = scales.astype(np.int32)[..., None] - _EXPONENT_BIAS
    with np.errstate(over="ignore"):
        values = np.ldexp(values, exponents)
    values = np.where(scales[..., None] == 255, np.float32(np.nan), values)
    return values.astype(DTYPE).reshape(*scales.shape[:-1], -1)


def packed_among(wanted: set[str], found: set[str]) -> set[str]:
    """Names of tensors that are stored so."""
    return {
        name for name in wanted - found if f"{name}{BLOCKS}" in found and f"{name}{SCALES}" in found
    }


def parts_of(names: set[str]) -> set[str]:
    """Names of what is stored for tensors."""
    return {f"{name}{suffix}" for name in names for suffix in (BLOCKS, SCALES)}


def check_packed(name: str, shape: tuple[int, ...], reader: Reader) -> None:
    """Refuse what does not hold a tensor of this shape.

    Raises:
        WeightsError: It is of another shape or type.
    """
    experts, reads, writes = shape
    if reads % _GROUP:
        raise WeightsError(
            f"{name}{BLOCKS}: {_GROUP} numbers have a scale, which do not divide the {reads} that"
            " config.json gives; correct config.json or the weights"
        )
    groups = (experts, writes, reads // _GROUP)
    for suffix, wanted in ((BLOCKS, (*groups, _BYTES)), (SCALES, groups)):
        stored = reader.tensors[name + suffix]
        if stored.shape != wanted or stored.dtype != "U8":
            raise WeightsError(
                f"{name}{suffix}: is {stored.dtype}{list(stored.shape)} where config.json gives"
                f" U8{list(wanted)}; correct config.json or the weights"
            )


def read_packed(reader: Reader, name: str, first: int, rows: int) -> np.ndarray:
    """Matrices `[rows, in, out]` of experts from `first` on, in `DTYPE`."""
    blocks, scales = (reader.read(name + suffix, first, rows) for suffix in (BLOCKS, SCALES))
    return unpack(blocks, scales).transpose(0, 2, 1)
