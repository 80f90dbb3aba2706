"""Arrays filled up to whole tiles."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp


def pad_to_multiple(x: Any, multiples: Mapping[int, int], **how: Any) -> Any:
    """`x` with each of these axes filled up behind to a multiple.

    Args:
        x: Any array.
        multiples: By axis, counted from 0.
        **how: Of `jnp.pad`; zeros by default.

    Cost: a copy where anything is missing, else nothing.
    """
    missing = [-size % multiples.get(axis, 1) for axis, size in enumerate(x.shape)]
    return jnp.pad(x, [(0, n) for n in missing], **how) if any(missing) else x
