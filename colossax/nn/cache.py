"""What the layers of a model keep of the tokens they have seen."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from colossax.config import Precision
from colossax.errors import InputError
from colossax.typing import Dims

KINDS = ("contiguous",)
"""Those that there are."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheArray:
    """One array of a cache.

    Attributes:
        shape: Sizes.
        dims: Logical dim of each, which the rules of the `cache` role lay out, or None.
        role: What its numbers are: a field of `plan.precision`, which names their dtype.
    """

    shape: tuple[int, ...]
    dims: Dims
    role: str = "cache"

    def __post_init__(self):
        if len(self.shape) != len(self.dims):
            raise InputError(
                f"cache: shape {self.shape} has {len(self.shape)} dims and {len(self.dims)} names"
                f" {self.dims}; give one name or None for each"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """The cache of the layers of one kind, array by array.

    Attributes:
        arrays: By name, each of its own shape: values may be narrower than keys.
        kind: How a slot is found. `contiguous`: `[layers, seats, slots, ...]`, a slot's index is
            the position it holds. Names kept for others, which there are not yet: `windowed`
            (slots in turn, as many as the window), `paged` (pages that seats share), `sequence`
            (one state per seat, no slots) and `latent` (what keys and values are made from).

    Raises:
        InputError: The kind is none that there is.
    """

    arrays: Mapping[str, CacheArray]
    kind: str = "contiguous"

    def __post_init__(self):
        if self.kind not in KINDS:
            raise InputError(
                f"cache: there is no kind '{self.kind}' yet; use one of {', '.join(KINDS)}"
            )

    def zeros(self, dtypes: Any) -> dict[str, Array]:
        """An empty cache.

        Args:
            dtypes: One dtype for all arrays, or a plan's precision, in which each has its role.

        Raises:
            InputError: The precision knows no such role.
        """
        return {
            name: jnp.zeros(one.shape, _dtype(name, one, dtypes))
            for name, one in self.arrays.items()
        }


def _dtype(name: str, one: CacheArray, dtypes: Any) -> Any:
    if not isinstance(dtypes, Precision):
        return dtypes
    dtype = getattr(dtypes, one.role, None)
    if dtype is None:
        raise InputError(
            f"cache: plan.precision names no dtype under '{one.role}', the role of '{name}'; use"
            " 'cache', 'compute' or 'accumulation'"
        )
    return dtype
