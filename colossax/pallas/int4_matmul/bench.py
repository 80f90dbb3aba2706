"""Shapes on which matmuls with weights of four bits are measured, and how far from float64."""

import functools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from colossax.pallas.bench import Case
from colossax.pallas.narrow.bench import CHECKED, narrow_case, narrow_shapes, taking
from colossax.pallas.target import Target

from .api import IMPLEMENTATIONS, int4_matmul
from .proof import operands
from .spec import GROUP, Int4Spec


def cases(target: Target, *, scale: int, dtype: Any) -> Iterator[Case]:
    """See `narrow_shapes`; the dense matrix has four times the bytes."""
    dtypes = jnp.dtype(dtype)
    for rows, k, n in narrow_shapes(scale, GROUP):
        spec = Int4Spec(rows=rows, inputs=k, outputs=n, dtype=dtypes, zeros=True)
        yield narrow_case(
            "int4 matmul",
            (rows, k, n),
            taking(IMPLEMENTATIONS, spec, target),
            _multiply,
            inputs=functools.partial(_inputs, rows, k, n, dtypes),
            truth=_truth,
            moved_bytes=k * n / 2 + 3 * k * n / GROUP,
        )


def _inputs(rows: int, k: int, n: int, dtype: Any, seed: int) -> tuple[Any, ...]:
    """x, codes, scales, zeros, and the matrix in x's dtype."""
    x, codes, scales, zeros = operands(rows, k, n, True, seed)
    numbers = jnp.stack([codes & 15, codes >> 4], axis=1).reshape(-1, GROUP, n)
    w = (numbers.astype(jnp.int8) - zeros[:, None].astype(jnp.int8)).astype(jnp.float32)
    w = (w * scales[:, None].astype(jnp.float32)).reshape(k, n)
    return x.astype(dtype), codes, scales, zeros, w.astype(dtype)


def _multiply(name: str, x: Any, codes: Any, scales: Any, zeros: Any, _w: Any) -> Any:
    return int4_matmul(x, codes, scales, zeros, implementation=name)


def _truth(given: tuple[Any, ...]) -> np.ndarray:
    x, codes, scales, zeros, _ = (np.asarray(z) for z in given)
    codes, scales, zeros = (z[:, :CHECKED] for z in (codes, scales, zeros))
    numbers = np.empty((2 * codes.shape[0], codes.shape[1]))
    numbers[0::2], numbers[1::2] = codes % 16, codes // 16
    of_inputs = (np.repeat(z.astype(np.float64), GROUP, axis=0) for z in (zeros, scales))
    zero, scale = of_inputs
    return x.astype(np.float64) @ ((numbers - zero) * scale)
