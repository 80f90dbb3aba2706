"""What a matmul with N:M sparse weights asks for, as far as choosing an implementation goes."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import ClassVar

from colossax.pallas.narrow.spec import NarrowSpec, all_rows, filled
from colossax.pallas.proof import Variant

FOUR = 4
"""Neighbouring inputs of which some are kept."""

KEPT = (1, 2)
"""How many of them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseSpec(NarrowSpec):
    """Static facts of one call: m rows of k inputs to n outputs, `kept` of each four inputs."""

    kept: int

    def __str__(self) -> str:
        return f"{super().__str__()}, {self.kept}:{FOUR}"

    @property
    def variant(self) -> "SparseVariant":
        """Of the kernel that the call would take."""
        return SparseVariant(rows=filled(self.rows), kept=self.kept)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseVariant(Variant):
    """What selects a compiled kernel; inputs and outputs are its operands."""

    operation: ClassVar[str] = "sparse_matmul"
    rows: int
    kept: int

    def __str__(self) -> str:
        return f"sparse matmul, {self.rows} rows, {self.kept}:{FOUR}"


def variants() -> Iterator[SparseVariant]:
    """All that `auto` asks for."""
    for kept, count in itertools.product(KEPT, all_rows()):
        yield SparseVariant(rows=count, kept=kept)
