"""What a grouped matmul asks for, as far as choosing an implementation needs to know."""

import dataclasses
import math
from typing import ClassVar

import numpy as np

from colossax.pallas.proof import Variant


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedSpec:
    """Static facts of one call: t rows in e groups, d to f features."""

    rows: int
    groups: int
    features_in: int
    features_out: int
    dtype: np.dtype

    def __str__(self) -> str:
        sizes = f"{self.rows} x {self.features_in} x {self.features_out}"
        return f"{sizes} in {self.groups} groups, {self.dtype}"

    @property
    def variant(self) -> "GroupedVariant":
        """Of the kernels that the call would take."""
        return GroupedVariant(
            dtype=self.dtype.name,
            wide_in=_wide(self.features_in),
            wide_out=_wide(self.features_out),
        )


def _wide(features: int) -> bool:
    """Whether features, filled up to a multiple of 128, are a multiple of 256."""
    return math.ceil(features / 128) % 2 == 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedVariant(Variant):
    """What selects compiled kernels, forward and backward; sizes are their operands.

    `wide_in` and `wide_out` are whether d and f, filled up, divide into tiles of the wider kind.
    """

    operation: ClassVar[str] = "grouped_matmul"
    dtype: str
    wide_in: bool
    wide_out: bool

    def __str__(self) -> str:
        sides = ("wide" if wide else "narrow" for wide in (self.wide_in, self.wide_out))
        return f"grouped matmul, {self.dtype}, {' to '.join(sides)} tiles"
