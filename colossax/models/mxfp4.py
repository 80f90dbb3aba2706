"""MXFP4 weights, read as floats: numbers of four bits, a scale for each 32 of them.

A matrix of each expert `[experts, in, out]` is stored as `NAME_blocks` `[experts, out, in / 32,
16]`, two numbers in a byte, the lower bits first, and `NAME_scales` `[experts, out, in / 32]`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from colossax.errors import WeightsError
from colossax.models.conversion import Tensor
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


class MXFP4:
    """Matrices of experts `[experts, in, out]`, in `DTYPE`; see `packed.Packed`."""

    dtype = DTYPE

    def __init__(self, tensor: Tensor, files: Mapping[str, str], reader: Reader):
        """Check what is stored.

        Args:
            tensor: The tensor that it stands for.
            files: Name in the files, by the end of the name.
            reader: The files.

        Raises:
            WeightsError: It is of another shape or type.
        """
        self._files, self._reader = files, reader
        experts, reads, writes = tensor.shape
        if reads % _GROUP:
            raise WeightsError(
                f"{files[BLOCKS]}: {_GROUP} numbers have a scale, which do not divide the {reads}"
                " that config.json gives; correct config.json or the weights"
            )
        groups = (experts, writes, reads // _GROUP)
        for suffix, wanted in ((BLOCKS, (*groups, _BYTES)), (SCALES, groups)):
            stored = reader.tensors[files[suffix]]
            if stored.shape != wanted or stored.dtype != "U8":
                raise WeightsError(
                    f"{files[suffix]}: is {stored.dtype}{list(stored.shape)} where config.json"
                    f" gives U8{list(wanted)}; correct config.json or the weights"
                )

    def rows(self, first: int, count: int) -> np.ndarray:
        """Matrices of so many experts from `first` on."""
        blocks, scales = (
            self._reader.read(self._files[suffix], first, count) for suffix in (BLOCKS, SCALES)
        )
        return unpack(blocks, scales).transpose(0, 2, 1)

    @classmethod
    def among(
        cls, tensors: Sequence[Tensor], names: Mapping[str, str], reader: Reader
    ) -> tuple[dict[str, Any], set[str]]:
        """Tensors that are stored so, and the full names of what they are stored as."""
        found: dict[str, Any] = {}
        for tensor in tensors:
            files = {end: names.get(tensor.name + end, "") for end in (BLOCKS, SCALES)}
            if tensor.name not in names and all(files.values()):
                found[tensor.name] = cls(tensor, files, reader)
        return found, {f"{name}{end}" for name in found for end in (BLOCKS, SCALES)}
