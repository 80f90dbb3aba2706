"""What a matmul with weights of four bits asks for, as far as choosing an implementation goes."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import ClassVar

from colossax.pallas.narrow.spec import NarrowSpec, all_rows, filled
from colossax.pallas.proof import Variant

GROUP = 128
"""Inputs that share a scale."""

CODES_A_BYTE = 2

ZERO = 8
"""The code of 0 where no zeros are given."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int4Spec(NarrowSpec):
    """Static facts of one call: m rows of k inputs to n outputs, with zeros or without."""

    zeros: bool

    def __str__(self) -> str:
        return f"{super().__str__()}, {'zeros' if self.zeros else 'symmetric'}"

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


def variants() -> Iterator[Int4Variant]:
    """All that `auto` asks for."""
    for zeros, count in itertools.product((False, True), all_rows()):
        yield Int4Variant(rows=count, zeros=zeros)
