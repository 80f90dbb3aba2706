"""What the layers of a model keep of the tokens they have seen."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from colossax.config import Precision
from colossax.errors import InputError
from colossax.typing import Dims

KINDS = ("contiguous", "windowed", "sequence")
"""Those that there are."""


def window_slots(left: int | None, *, slots: int, chunk: int | None) -> int:
    """Slots that a layer needs whose tokens see `left` keys strictly before them, None for all.

    A call writes its tokens before it reads: the first of `chunk` of them still needs `left` keys.

    Args:
        left: Of the layer's window.
        slots: Of a whole sequence.
        chunk: Most tokens of a seat in one call; None: any number, which needs all slots.
    """
    return slots if left is None or chunk is None else min(slots, left + chunk)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheArray:
    """One array of a cache.

    Attributes:
        shape: Sizes.
        dims: Logical dim of each, which the rules of the `cache` role lay out, or None.
        role: What its numbers are: a field of `plan.precision`, which names their dtype.
        dtype: Theirs under any plan, as of counts; None: as the role says.
        coded: Whether it may be in codes of eight bits with a scale for each vector of its last
            dim beside it: so it may where `attend_cache` alone writes and reads it.
    """

    shape: tuple[int, ...]
    dims: Dims
    role: str = "cache"
    dtype: str | None = None
    coded: bool = False

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
        kind: How what is kept of a token is found. `contiguous`: `[layers, seats, slots, ...]`,
            position p in slot p. `windowed`: likewise with fewer slots than positions, taken in
            turn: position p in slot p mod slots. `sequence`: `[layers, seats, ...]`, one state for
            all tokens of a seat. What is kept, keys and values or what they are made from, is no
            matter of the kind.

    Raises:
        InputError: The kind is none that there is.
    """

    arrays: Mapping[str, CacheArray]
    kind: str = "contiguous"

    def __post_init__(self):
        if self.kind not in KINDS:
            raise InputError(
                f"cache: there is no kind '{self.kind}'; use one of {', '.join(KINDS)}"
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
    if one.dtype is not None:
        return one.dtype
    if not isinstance(dtypes, Precision):
        return dtypes
    dtype = getattr(dtypes, one.role, None)
    if dtype is None:
        raise InputError(
            f"cache: plan.precision names no dtype under '{one.role}', the role of '{name}'; use"
            " 'cache', 'compute' or 'accumulation'"
        )
    return dtype
