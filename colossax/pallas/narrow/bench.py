"""Shapes on which matmuls of few rows are measured, and how far from float64."""

import functools
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from colossax.pallas.bench import Case, relative_error, tolerance
from colossax.pallas.target import Target

from .spec import NarrowSpec

ANCHOR = "dense"
"""The same matrix kept in the dtype of the rows, the last of the inputs: `[k, n]`."""

CHECKED = 64
"""Outputs that are compared with float64."""


def narrow_case(
    kernel: str,
    shape: tuple[int, int, int],
    names: list[str],
    multiply: Callable[..., Any],
    *,
    inputs: Callable[[int], tuple[Any, ...]],
    truth: Callable[[tuple[Any, ...]], np.ndarray],
    moved_bytes: float,
) -> Case:
    """A case.

    Args:
        kernel: What it is called.
        shape: Rows, inputs and outputs.
        names: Of the implementations that take it.
        multiply: `(implementation, *inputs)`.
        inputs: Of a seed.
        truth: The product of the first `CHECKED` outputs, in float64.
        moved_bytes: At least.
    """
    functions: dict[str, Callable[..., Any]] = {
        name: jax.jit(functools.partial(multiply, name)) for name in names
    }
    functions[ANCHOR] = jax.jit(_dense)
    m, k, n = shape
    return Case(
        kernel=kernel,
        shape=f"{m} x {k} x {n}",
        flops=2.0 * m * k * n,
        inputs=inputs,
        functions=functions,
        anchor=ANCHOR,
        truth=truth,
        error=_error,
        tolerance=tolerance(jnp.bfloat16),
        moved_bytes=moved_bytes,
    )


def narrow_shapes(scale: int, multiple: int) -> Iterator[tuple[int, int, int]]:
    """Few rows times the matrices of a model of 8 B parameters, divided by `scale`."""
    for rows in (1, 32):
        for sizes in ((4096, 14_336), (14_336, 4096)):
            k, n = (max(multiple, size // scale // multiple * multiple) for size in sizes)
            yield rows, k, n


def taking(
    implementations: Mapping[str, ModuleType], spec: NarrowSpec, target: Target
) -> list[str]:
    """Those that are measured, and take the call."""
    why_not = {name: implementations[name].why_not(spec, target) for name in ("mosaic", "xla")}
    return [name for name, why in why_not.items() if why is None]


def _dense(x: Any, *others: Any) -> Any:
    return jnp.dot(x, others[-1], preferred_element_type=jnp.float32).astype(x.dtype)


def _error(_name: str, truth: np.ndarray, out: Any) -> float:
    return relative_error(np.asarray(out[:, :CHECKED].astype(jnp.float32), np.float64), truth)
