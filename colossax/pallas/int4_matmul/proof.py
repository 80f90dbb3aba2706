"""What the Mosaic kernel of matmuls with weights of four bits is tried on before it is taken."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from colossax.pallas.narrow.proof import Sizes, narrow_trials
from colossax.pallas.proof.trial import Trial

from .api import int4_matmul
from .spec import CODES_A_BYTE, GROUP, Int4Variant

SIZES = Sizes(small=(1152, 256))


def trials(
    variant: Int4Variant, *, kernel: str = "mosaic", sizes: Sizes = SIZES
) -> Iterator[Trial]:
    """See `narrow_trials`; the small one with scales of float16 too, as folders have them."""
    of_sizes = functools.partial(operands, variant.rows, zeros=variant.zeros)
    yield from narrow_trials(_call, of_sizes, kernel, sizes)
    halves = functools.partial(of_sizes, scales=jnp.float16)
    first = next(narrow_trials(_call, halves, kernel, sizes))
    yield dataclasses.replace(first, name="scales of float16")


def operands(
    rows: int,
    inputs: int,
    outputs: int,
    zeros: bool,
    seed: int = 0,
    scales: Any = jnp.bfloat16,
) -> tuple[Any, ...]:
    """Rows, codes, scales of a type and zeros or none, of random numbers."""
    keys = jax.random.split(jax.random.key(seed), 4)
    groups = inputs // GROUP
    x = jax.random.normal(keys[0], (rows, inputs), jnp.bfloat16)
    codes = jax.random.bits(keys[1], (inputs // CODES_A_BYTE, outputs), jnp.uint8)
    of_groups = jax.random.uniform(keys[2], (groups, outputs), scales, 0.5, 2.0)
    more = (jax.random.bits(keys[3], (groups, outputs), jnp.uint8) & 15,) if zeros else ()
    return x, codes, of_groups, *more


def _call(name: str, x: Any, codes: Any, scales: Any, zeros: Any = None) -> dict[str, Any]:
    return {"out": int4_matmul(x, codes, scales, zeros, implementation=name)}
