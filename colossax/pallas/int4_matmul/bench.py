"""Shapes on which matmuls with weights of four bits are measured, and how far from float64."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from colossax.pallas.bench import Case, relative_error, tolerance
from colossax.pallas.target import Target

from .api import IMPLEMENTATIONS, int4_matmul
from .proof import operands
from .spec import GROUP, Int4Spec

ANCHOR = "dense"
"""The same matrix kept in the dtype of the rows: four times the bytes."""

CHECKED = 64
"""Outputs that are compared with float64."""


def cases(target: Target, *, scale: int, dtype: Any) -> Iterator[Case]:
    """Few rows times the matrices of a model of 8 B parameters, divided by `scale`."""
    for rows in (1, 32):
        for k, n in ((4096, 14_336), (14_336, 4096)):
            k, n = (max(GROUP, size // scale // GROUP * GROUP) for size in (k, n))
            dtypes = jnp.dtype(dtype)
            spec = Int4Spec(rows=rows, inputs=k, outputs=n, dtype=dtypes, zeros=True)
            names = [
                name
                for name in ("mosaic", "xla")
                if IMPLEMENTATIONS[name].why_not(spec, target) is None
            ]
            functions: dict[str, Callable[..., Any]] = {
                name: jax.jit(functools.partial(_multiply, name)) for name in names
            }
            functions[ANCHOR] = jax.jit(_dense)
            yield Case(
                kernel="int4 matmul",
                shape=f"{rows} x {k} x {n}",
                flops=2.0 * rows * k * n,
                inputs=functools.partial(_inputs, rows, k, n, dtypes),
                functions=functions,
                anchor=ANCHOR,
                truth=_truth,
                error=_error,
                tolerance=tolerance(jnp.bfloat16),
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


def _dense(x: Any, _codes: Any, _scales: Any, _zeros: Any, w: Any) -> Any:
    return jnp.dot(x, w, preferred_element_type=jnp.float32).astype(x.dtype)


def _truth(given: tuple[Any, ...]) -> np.ndarray:
    x, codes, scales, zeros, _ = (np.asarray(z) for z in given)
    codes, scales, zeros = (z[:, :CHECKED] for z in (codes, scales, zeros))
    numbers = np.empty((2 * codes.shape[0], codes.shape[1]))
    numbers[0::2], numbers[1::2] = codes % 16, codes // 16
    of_inputs = (np.repeat(z.astype(np.float64), GROUP, axis=0) for z in (zeros, scales))
    zero, scale = of_inputs
    return x.astype(np.float64) @ ((numbers - zero) * scale)


def _error(_name: str, truth: np.ndarray, out: Any) -> float:
    return relative_error(np.asarray(out[:, :CHECKED].astype(jnp.float32), np.float64), truth)
