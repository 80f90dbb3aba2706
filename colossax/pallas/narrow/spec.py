"""What a matmul of few rows asks for, as far as choosing an implementation goes."""

import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

MOST_ROWS = 32
"""More rows are better served by weights made numbers first."""

COLUMNS = 128
"""Outputs of a block of the kernels."""

_ROUND = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class NarrowSpec:
    """Static facts of one call: m rows of k inputs to n outputs."""

    rows: int
    inputs: int
    outputs: int
    dtype: np.dtype
    checked: bool = False

    def __str__(self) -> str:
        return f"{self.rows} x {self.inputs} x {self.outputs}, {self.dtype}"

    def why_not_narrow(self) -> str | None:
        """The first thing about this call that no such kernel can do."""
        if self.dtype != jnp.bfloat16:
            return f"the kernel takes bfloat16, found {self.dtype}"
        if self.rows > MOST_ROWS:
            return f"{self.rows} rows; the kernel takes {MOST_ROWS}"
        if self.outputs % COLUMNS:
            return f"{self.outputs} outputs are no multiple of {COLUMNS}"
        if self.checked:
            return "JAX's kernels know no shard_map that checks its values; give check_vma=False"
        return None


def filled(rows: int) -> int:
    """Rows of a kernel for so many."""
    return -(-rows // _ROUND) * _ROUND


def all_rows() -> Iterator[int]:
    """Of all kernels."""
    yield from range(_ROUND, MOST_ROWS + 1, _ROUND)
