"""What the Mosaic kernel of matmuls with weights of four bits is tried on before it is taken."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from colossax.pallas.bench import tolerance
from colossax.pallas.proof.trial import Trial

from .api import int4_matmul
from .spec import CODES_A_BYTE, GROUP, Int4Variant


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Inputs and outputs of the cases."""

    small: tuple[int, int] = (1152, 256)
    large: tuple[int, int] = (4096, 14_336)


def trials(
    variant: Int4Variant, *, kernel: str = "mosaic", sizes: Sizes = Sizes()
) -> Iterator[Trial]:
    """A small case of an odd number of groups, and a larger one that is timed."""
    yield _trial(variant, kernel, "an odd number of groups", sizes.small)
    larger = _trial(variant, kernel, "many outputs", sizes.large)
    yield dataclasses.replace(larger, peers={"xla": functools.partial(_call, "xla")})


def operands(rows: int, inputs: int, outputs: int, zeros: bool, seed: int = 0) -> tuple[Any, ...]:
    """Rows, codes, scales and zeros or none, of random numbers."""
    keys = jax.random.split(jax.random.key(seed), 4)
    groups = inputs // GROUP
    x = jax.random.normal(keys[0], (rows, inputs), jnp.bfloat16)
    codes = jax.random.bits(keys[1], (inputs // CODES_A_BYTE, outputs), jnp.uint8)
    scales = jax.random.uniform(keys[2], (groups, outputs), jnp.bfloat16, 0.5, 2.0)
    more = (jax.random.bits(keys[3], (groups, outputs), jnp.uint8) & 15,) if zeros else ()
    return x, codes, scales, *more


def _trial(variant: Int4Variant, kernel: str, name: str, sizes: tuple[int, int]) -> Trial:
    return Trial(
        name=name,
        inputs=operands(variant.rows, *sizes, variant.zeros),
        kernel=functools.partial(_call, kernel),
        truth=functools.partial(_call, "xla"),
        tolerance=tolerance(jnp.bfloat16),
    )


def _call(name: str, x: Any, codes: Any, scales: Any, zeros: Any = None) -> dict[str, Any]:
    return {"out": int4_matmul(x, codes, scales, zeros, implementation=name)}
