"""Shapes on which matmuls with N:M sparse weights are measured, and how far from float64."""

import functools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from colossax.pallas.bench import Case
from colossax.pallas.narrow.bench import CHECKED, narrow_case, narrow_shapes, taking
from colossax.pallas.target import Target

from .api import IMPLEMENTATIONS, sparse_matmul
from .mosaic_gpu import FOURS
from .proof import operands
from .spec import FOUR, KEPT, SparseSpec
from .xla import expanded


def cases(target: Target, *, scale: int, dtype: Any) -> Iterator[Case]:
    """See `narrow_shapes`; with two of four kept the dense matrix has 4/3 of the bytes."""
    dtypes = jnp.dtype(dtype)
    for kept in KEPT:
        for rows, k, n in narrow_shapes(scale, FOUR * FOURS):
            spec = SparseSpec(rows=rows, inputs=k, outputs=n, dtype=dtypes, kept=kept)
            yield narrow_case(
                f"{kept}:{FOUR} matmul",
                (rows, k, n),
                taking(IMPLEMENTATIONS, spec, target),
                _multiply,
                inputs=functools.partial(_inputs, rows, k, n, kept, dtypes),
                truth=_truth,
                moved_bytes=kept * k * n / FOUR * (dtypes.itemsize + 1),
            )


def _inputs(rows: int, k: int, n: int, kept: int, dtype: Any, seed: int) -> tuple[Any, ...]:
    """x, values, their places, and the matrix in x's dtype."""
    x, values, index = operands(rows, k, n, kept, seed)
    w = expanded(values, index, dtype).T
    return x.astype(dtype), values.astype(dtype), index, w


def _multiply(name: str, x: Any, values: Any, index: Any, _w: Any) -> Any:
    return sparse_matmul(x, values, index, implementation=name)


def _truth(given: tuple[Any, ...]) -> np.ndarray:
    x, values, index, _ = (np.asarray(z) for z in given)
    values, index = (z[:, :CHECKED].astype(np.float64) for z in (values, index))
    w = np.zeros((x.shape[1] // FOUR, FOUR, values.shape[1]))
    for one, place in zip(values, index.astype(int), strict=True):
        n, q = np.indices(place.shape)
        w[q, place, n] = one
    return x.astype(np.float64) @ w.reshape(x.shape[1], -1)
