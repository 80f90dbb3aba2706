"""What a matmul with weights of four bits asks for, as far as choosing an implementation goes."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from colossax.pallas.proof import Variant

GROUP = 128
"""Inputs that share a scale."""

CODES_A_BYTE = 2

ZERO = 8
"""The code of 0 where no zeros are given."""

MOST_ROWS = 32
"""More rows are better served by weights made numbers first."""

_ROUND = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int4Spec:
    """Static facts of one call: m rows of k inputs to n outputs."""

    rows: int
    inputs: int
    outputs: int
    dtype: np.dtype
    zeros: bool
    checked: bool = False

    def __str__(self) -> str:
        kind = "zeros" if self.zeros else "symmetric"
        return f"{self.rows} x {self.inputs} x {self.outputs}, {self.dtype}, {kind}"

    @property
    def variant(self) -> "Int4Variant":
        """Of the kernel that the call would take."""
        return Int4Variant(rows=filled(self.rows), zeros=self.zeros)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int4Variant(Variant):
    """What selects a compiled kernel; inputs and outputs are its operands."""

    operation: ClassVar[str] = "int4_matmul"
    rows: int
    zeros: bool

    def __str__(self) -> str:
        return f"int4 matmul, {self.rows} rows, {'zeros' if self.zeros else 'symmetric'}"


def filled(rows: int) -> int:
    """Rows of a kernel for so many."""
    return -(-rows // _ROUND) * _ROUND


def variants() -> Iterator[Int4Variant]:
    """All that `auto` asks for."""
    rows = range(_ROUND, MOST_ROWS + 1, _ROUND)
    for zeros, count in itertools.product((False, True), rows):
        yield Int4Variant(rows=count, zeros=zeros)
