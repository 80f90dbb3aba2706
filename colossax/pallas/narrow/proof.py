"""What kernels of matmuls of few rows are tried on before they are taken."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp

from colossax.pallas.bench import tolerance
from colossax.pallas.proof.trial import Trial

Call = Callable[..., dict[str, Any]]
"""`(implementation, *inputs)`: the product by name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Inputs and outputs of the cases."""

    small: tuple[int, int]
    large: tuple[int, int] = (4096, 14_336)


def narrow_trials(
    call: Call, operands: Callable[[int, int], tuple[Any, ...]], kernel: str, sizes: Sizes
) -> Iterator[Trial]:
    """A small case, of an odd number of steps as a rule, and a larger one that is timed.

    Args:
        call: The matmul.
        operands: Its inputs, of inputs and outputs.
        kernel: The implementation that is tried.
        sizes: Of both.
    """
    trials = [
        Trial(
            name=name,
            inputs=operands(*size),
            kernel=functools.partial(call, kernel),
            truth=functools.partial(call, "xla"),
            tolerance=tolerance(jnp.bfloat16),
        )
        for name, size in (("an odd number of steps", sizes.small), ("many outputs", sizes.large))
    ]
    yield trials[0]
    yield dataclasses.replace(trials[1], peers={"xla": functools.partial(call, "xla")})
