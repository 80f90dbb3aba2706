"""What attention to pages asks for, as far as choosing an implementation needs to know."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from colossax.pallas.proof import Variant

HEAD_SIZES = (64, 128, 256)
"""Of keys and values that there are kernels for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedSpec:
    """Static facts of one call.

    Attributes:
        groups: That read together, of `width` tokens each.
        width: See there.
        heads: Of queries.
        kv_heads: Of keys.
        head_dim: Of queries and keys.
        v_head_dim: Of values.
        page_slots: Slots of a page.
        pages: Most that a sequence has.
        q_dtype: Of queries.
        dtype: Of keys and values.
        soft_cap: Whether there is one.
        words: Whether tokens see some slots by ancestor words.
        mass: Whether what was given to each slot is asked for.
        more: What else the scores depend on, which no kernel knows: for people.
        checked: Whether it stands in a `shard_map` that checks along which axes operands differ.
    """

    groups: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    page_slots: int
    pages: int
    q_dtype: np.dtype
    dtype: np.dtype
    soft_cap: bool = False
    words: bool = False
    mass: bool = False
    more: tuple[str, ...] = ()
    checked: bool = False

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.kv_heads} heads of {self.head_dim}/{self.v_head_dim}"
        sizes = f"{self.groups} x {self.width} x {self.pages} pages of {self.page_slots}"
        return ", ".join([sizes, heads, str(self.dtype), *_asked(self), *self.more])

    @property
    def variant(self) -> "PagedVariant":
        """Of the kernel that the call would take."""
        return PagedVariant(
            head_dim=self.head_dim,
            dtype=self.dtype.name,
            soft_cap=self.soft_cap,
            words=self.words,
            mass=self.mass,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedVariant(Variant):
    """What selects a compiled kernel; pages, groups and ranges are its operands."""

    operation: ClassVar[str] = "paged_attention"
    head_dim: int
    dtype: str
    soft_cap: bool = False
    words: bool = False
    mass: bool = False

    def __str__(self) -> str:
        named = ["paged attention", f"heads of {self.head_dim}", self.dtype, *_asked(self)]
        return ", ".join(named)


def variants() -> Iterator[PagedVariant]:
    """All that `auto` asks for, the usual ones first."""
    kinds: tuple[dict[str, bool], ...] = ({}, {"words": True}, {"mass": True})
    every = itertools.product(kinds, ("bfloat16", "float16"), HEAD_SIZES, (False, True))
    for kind, dtype, h, soft_cap in every:
        yield PagedVariant(head_dim=h, dtype=dtype, soft_cap=soft_cap, **kind)


def _asked(one: PagedSpec | PagedVariant) -> Iterator[str]:
    names = {"soft cap": one.soft_cap, "ancestor words": one.words, "mass of slots": one.mass}
    return (name for name, yes in names.items() if yes)
