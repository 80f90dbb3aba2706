"""What the Mosaic kernel of matmuls with N:M sparse weights is tried on before it is taken."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from colossax.pallas.narrow.proof import Sizes, narrow_trials
from colossax.pallas.proof.trial import Trial

from .api import sparse_matmul
from .spec import FOUR, SparseVariant

SIZES = Sizes(small=(1280, 256))


def trials(
    variant: SparseVariant, *, kernel: str = "mosaic", sizes: Sizes = SIZES
) -> Iterator[Trial]:
    """See `narrow_trials`."""
    of_sizes = functools.partial(operands, variant.rows, kept=variant.kept)
    yield from narrow_trials(_call, of_sizes, kernel, sizes)


def operands(rows: int, inputs: int, outputs: int, kept: int, seed: int = 0) -> tuple[Any, ...]:
    """Rows, values and places of these, of random numbers."""
    keys = jax.random.split(jax.random.key(seed), 3)
    fours = (outputs, inputs // FOUR)
    x = jax.random.normal(keys[0], (rows, inputs), jnp.bfloat16)
    values = jax.random.normal(keys[1], (kept, *fours), jnp.bfloat16)
    order = jnp.argsort(jax.random.uniform(keys[2], (FOUR, *fours)), axis=0)
    return x, values, jnp.sort(order[:kept], axis=0).astype(jnp.int8)


def _call(name: str, x: Any, values: Any, index: Any) -> dict[str, Any]:
    return {"out": sparse_matmul(x, values, index, implementation=name)}
