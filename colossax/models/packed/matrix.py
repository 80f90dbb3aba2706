"""A matrix of a folder that is stored as several tensors, and what all kinds of these share."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from colossax.errors import WeightsError
from colossax.models.conversion import Tensor
from colossax.models.safetensors import DTYPES, Reader

WEIGHT = "weight"


@runtime_checkable
class Packed(Protocol):
    """A tensor as its reader sees it, whatever it is stored as.

    Attributes:
        dtype: Of its numbers.
    """

    dtype: np.dtype

    def rows(self, first: int, count: int) -> np.ndarray:
        """Rows of the tensor from `first` on, in `dtype`."""
        ...


@dataclasses.dataclass(frozen=True)
class Codes:
    """A matrix in codes: `number = (code - zero) scale`.

    Attributes:
        codes: `[out, in]`, whole numbers from 0 on in uint8, or floats of eight bits.
        scales: `[out, groups]`.
        zeros: Shaped alike, in codes; or the one of all.
        of: Of each input which group it is in.
    """

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | int
    of: np.ndarray

    def numbers(self) -> np.ndarray:
        """What they stand for, computed in float32."""
        values = self.codes.astype(np.float32)
        zeros = self.zeros
        values -= zeros if isinstance(zeros, int) else zeros.astype(np.float32)[:, self.of]
        values *= self.scales.astype(np.float32)[:, self.of]
        return values


class PackedMatrix(abc.ABC):
    """A matrix `[out, in]` of codes, with scales in floating point; see `Codes`.

    Numbers are computed in float32 and rounded once to the type of the scales.

    Attributes:
        scales_name: The part that scales are.
        order_name: The part that says which group an input is in, where files may have one.
        bits: Of a code.
        floats: Whether codes are floats.
        with_zeros: Whether groups have zeros of their own.
        groups: Into how many inputs fall.

    Cost: the matrix is unpacked whole, in float32, when its first rows are asked for, and let go
    with its last ones.
    """

    scales_name, order_name = "scales", ""
    bits: int
    floats = False
    with_zeros = True
    groups: int

    def __init__(self, tensor: Tensor, files: Mapping[str, str], reader: Reader):
        """Check what is stored.

        Args:
            tensor: The tensor that it stands for.
            files: Name in the files of each part, by the end of its name.
            reader: The files.

        Raises:
            WeightsError: Parts are missing, of another type or of other shapes.
        """
        self.name, self.shape = tensor.name, tensor.shape
        self._files, self._reader = files, reader
        self._whole: np.ndarray | None = None
        if len(self.shape) != 2 or tensor.dims[-1] not in tensor.layout.groups[0]:
            raise WeightsError(
                f"{self.name}: is stored in codes, and this family has it inputs first, which is"
                " not read; give the model in floats"
            )
        self.check()
        self.dtype = DTYPES[self.stored(self.scales_name).dtype]

    @abc.abstractmethod
    def check(self) -> None:
        """Refuse parts that do not hold the matrix."""

    @abc.abstractmethod
    def codes(self) -> Codes:
        """What is stored, read."""

    def ordered(self) -> bool:
        """Whether inputs that share a group are no neighbours; reads what says so."""
        inputs = self.shape[1]
        beside = np.arange(inputs) // (inputs // self.groups)
        return not np.array_equal(self.groups_of_inputs(), beside)

    def rows(self, first: int, count: int) -> np.ndarray:
        """See `Packed`."""
        if self._whole is None:
            self._whole = self.codes().numbers().astype(self.dtype)
        found = self._whole[first : first + count]
        if first + count == self.shape[0]:
            self._whole = None
        return found

    def has(self, part: str) -> bool:
        """Whether there is such a part."""
        return part in self._files

    def stored(self, part: str) -> Any:
        """What the files say of a part."""
        return self._reader.tensors[self._files[part]]

    def read(self, part: str) -> np.ndarray:
        """A part's numbers."""
        return self._reader.read(self._files[part])

    def expect(self, part: str, kinds: tuple[str, ...], *shapes: tuple[int, ...]) -> None:
        """Refuse a part that is not there, or of another type or shape.

        Raises:
            WeightsError: Names it, what was found and what is wanted.
        """
        wanted = " or ".join(f"{'|'.join(kinds)}{list(shape)}" for shape in shapes)
        if not self.has(part):
            raise WeightsError(
                f"{self.name}: is stored in codes and has no '{part}', {wanted}; copy the weights"
                " again"
            )
        found = self.stored(part)
        if found.dtype not in kinds or found.shape not in shapes:
            raise WeightsError(
                f"{self._files[part]}: is {found.dtype}{list(found.shape)} where config.json gives"
                f" {wanted}; correct config.json or the weights"
            )

    def whole_groups(self, size: int, along: int, what: str) -> int:
        """How many groups of a size there are; -1 is all in one.

        Raises:
            WeightsError: The size does not divide them.
        """
        size = along if size == -1 else size
        if size < 1 or along % size:
            raise WeightsError(
                f"{self.name}: {what} of {size} do not divide its {along}; correct config.json or"
                " the weights"
            )
        return along // size

    def groups_of_inputs(self) -> np.ndarray:
        """The group of each input, as a part says it; without it neighbours have one.

        Raises:
            WeightsError: It names one that there is not.
        """
        inputs, part, groups = self.shape[1], self.order_name, self.groups
        if not self.has(part):
            return np.arange(inputs) // (inputs // groups)
        found = self.read(part)
        if found.min(initial=0) < 0 or found.max(initial=0) >= groups:
            raise WeightsError(
                f"{self._files[part]}: names groups from {found.min()} to {found.max()}, and there"
                f" are {groups}; copy the weights again"
            )
        return found


FLOATS = tuple(DTYPES)
"""Types that scales may have."""


def unpacked(words: np.ndarray, bits: int, axis: int, count: int) -> np.ndarray:
    """Codes in 32-bit words, the first in the lowest bits.

    Args:
        words: Of 32 bits.
        bits: Of a code.
        axis: Along which a word has several.
        count: How many there are along it; what fills the last word is left out.

    Returns:
        uint8, `count` long along the axis.
    """
    spread = np.moveaxis(words.view(np.uint32), axis, -1)
    codes = np.empty((*spread.shape, 32 // bits), np.uint8)
    for at in range(32 // bits):
        codes[..., at] = spread >> np.uint32(bits * at) & np.uint32(2**bits - 1)
    return np.moveaxis(codes.reshape(*spread.shape[:-1], -1)[..., :count], -1, axis)
