"""Who sees whom: one description of a mask, read as a dense truth or as one range per query."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

RANGES = "mask_ranges"
"""Name of the scope of what is computed of a mask alone: profiles and jaxprs show it."""

_LAST = np.iinfo(np.int32).max


def _static(default: Any) -> Any:
    return dataclasses.field(default=default, metadata={"static": True})


# Array fields are Any: trees of this type also hold partition specs, shapes or sentinels.
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Mask:
    """Which keys a query sees: those that pass every condition given.

    Positions order the tokens of one document; segments tell the documents of a row apart. Array
    fields are `[b, ...]` with `b` 1 or the batch, or None.

    Attributes:
        causal: Keys at `kv_position <= q_position`.
        window: `(left, right)`: keys at `q_position - left <= kv_position <= q_position + right`;
            None on a side leaves it open. `left` counts keys strictly before the query, so a
            sliding window of W keys, the query's own included, is `(W - 1, 0)`.
        prefix: int `[b]`: keys at `kv_position < prefix` are visible to their whole document,
            whatever `causal` and `window` say.
        q_positions: int `[b, s]`; default 0, 1, ... along the row, as for keys: queries and keys
            of different lengths are aligned at the start.
        kv_positions: int `[b, t]`; likewise.
        q_segments: int `[b, s]`: a query sees keys of its own segment. A negative segment is
            padding: it sees nothing and nobody sees it.
        kv_segments: int `[b, t]`; given if and only if `q_segments` is.
        kv_valid: bool `[b, t]`: keys that exist.
        ascending: Declares that segments and positions are in the order that `row_ranges` asks
            for. Values of arrays are not known when a kernel is chosen: without this, kernels that
            read masks as ranges decline segments and positions, for they would compute nonsense.
        ranges: What an implementation has computed of the other fields, once for many layers, see
            `with_ranges`; or None. `changed` makes another mask without them.
    """

    causal: bool = _static(False)
    window: tuple[int | None, int | None] | None = _static(None)
    prefix: Any = None
    q_positions: Any = None
    kv_positions: Any = None
    q_segments: Any = None
    kv_segments: Any = None
    kv_valid: Any = None
    ascending: bool = _static(False)
    ranges: Any = None

    def __post_init__(self):
        if self.window is not None and any(w is not None and w < 0 for w in self.window):
            raise ValueError(
                f"mask window {self.window} is negative; give the number of keys visible on"
                f" either side of the query, or None for all"
            )
        if (self.q_segments is None) != (self.kv_segments is None):
            given, lacking = "q_segments", "kv_segments"
            if self.q_segments is None:
                given, lacking = lacking, given
            raise ValueError(f"mask has {given} but no {lacking}; give both or neither")

    def changed(self, **fields: Any) -> "Mask":
        """Another mask, of other fields; ranges that were carried are none of its own."""
        return dataclasses.replace(self, **{"ranges": None, **fields})

    @property
    def left(self) -> int | None:
        """Keys visible before the query, None for all."""
        return None if self.window is None else self.window[0]

    @property
    def right(self) -> int | None:
        """Keys visible after the query, None for all."""
        right = None if self.window is None else self.window[1]
        return 0 if self.causal else right

    @property
    def ordered(self) -> bool:
        """Whether positions matter at all."""
        return self.left is not None or self.right is not None

    @property
    def indexed(self) -> bool:
        """Whether positions are the indices along the row, hence known without data."""
        return self.q_positions is None and self.kv_positions is None and self.prefix is None

    @property
    def ascends(self) -> bool:
        """Whether rows are known to be in the order of `row_ranges`."""
        placed = self.ordered and (self.q_positions is not None or self.kv_positions is not None)
        return self.ascending or not (placed or self.q_segments is not None)

    @property
    def everything(self) -> bool:
        """Whether every query sees every key."""
        return not self.ordered and self.q_segments is None and self.kv_valid is None


def positions(given: Any, length: int) -> Int[Array, "*b length"]:
    """Positions given, or the indices as `[1, length]`."""
    return jnp.arange(length, dtype=jnp.int32)[None] if given is None else given


def dense(mask: Mask, s: int, t: int) -> Bool[Array, "*b 1 s t"]:
    """The whole mask, True where a query sees a key; the truth that faster forms are held to.

    Cost: s * t bytes per row of the batch (1 row where the mask has no array).
    """
    return visible(
        mask,
        positions(mask.q_positions, s),
        positions(mask.kv_positions, t),
        mask.q_segments,
        mask.kv_segments,
        mask.kv_valid,
    )[..., None, :, :]


def visible(
    mask: Mask, q_position: Any, kv_position: Any, q_segment: Any, kv_segment: Any, kv_valid: Any
) -> Bool[Array, "*b s t"]:
    """`mask` for a tile whose rows and columns are described by `[*b, s]` and `[*b, t]` arrays."""
    q, kv = q_position[..., :, None], kv_position[..., None, :]
    seen = jnp.ones((*q.shape[:-1], kv.shape[-1]), bool)
    if mask.right is not None:
        seen &= kv <= q + mask.right
    if mask.left is not None:
        seen &= kv >= q - mask.left
    if mask.prefix is not None and mask.ordered:
        seen |= kv < mask.prefix[..., None, None]
    if q_segment is not None:
        seen &= q_segment[..., :, None] == kv_segment[..., None, :]
        seen &= q_segment[..., :, None] >= 0
    if kv_valid is not None:
        seen &= kv_valid[..., None, :]
    return seen


def why_no_ranges(mask: Mask) -> str | None:
    """Why a query's keys may not be one contiguous range, or None where they are."""
    if mask.kv_valid is not None:
        return "kv_valid may have holes; mark padding by negative segments instead"
    if mask.prefix is not None and mask.left is not None:
        return "a prefix and a window far behind it are two ranges"
    return None


def row_ranges(mask: Mask, s: int, t: int) -> tuple[Int[Array, "b s"], Int[Array, "b s"]]:
    """The keys `[lo, hi)` that each query sees, as local indices.

    A row must be in order: segments ascend along queries and along keys, padding aside, which
    stands before, between or behind documents and never inside one; and positions ascend within
    a segment (they restart in each: the order is of pairs of segment and position). Then neither
    `lo` nor `hi` ever falls along a row. A query that sees nothing has `lo == hi`.

    Cost: 8 bytes and about 2 log2(t) look-ups per query; no look-up without array fields.

    Raises:
        NotImplementedError: The mask is no range (`why_no_ranges`).
    """
    reason = why_no_ranges(mask)
    if reason is not None:
        raise NotImplementedError(f"mask is not one range of keys per query: {reason}")
    q = positions(mask.q_positions, s)
    first = jnp.full_like(q, -_LAST) if mask.left is None else q - mask.left
    last = jnp.full_like(q, _LAST - 1) if mask.right is None else q + mask.right
    if mask.prefix is not None:
        last = jnp.maximum(last, mask.prefix[:, None] - 1)
    if mask.q_segments is None and mask.kv_positions is None:
        lo, hi = jnp.clip(first, 0, t), jnp.clip(last, -1, t - 1) + 1
    else:
        kv = positions(mask.kv_positions, t)
        segment, kv_segment = jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1), jnp.int32)
        if mask.q_segments is not None:
            segment, padded = _fill_padding(mask.q_segments)
            first, last = jnp.where(padded, _LAST, first), jnp.where(padded, -_LAST, last)
            kv_segment, padded = _fill_padding(mask.kv_segments)
            kv = jnp.where(padded, _LAST, kv)
        lo = _count_before(kv_segment, kv, segment, first)
        hi = _count_before(kv_segment, kv, segment, last + 1)
    lo, hi = jnp.broadcast_arrays(lo, hi)
    return lo, jnp.maximum(lo, hi)


def _fill_padding(segments: Int[Array, "b t"]) -> tuple[Int[Array, "b t"], Bool[Array, "b t"]]:
    """Segments with padding counted to the segment before it, and where the padding is."""
    return jax.lax.cummax(jnp.maximum(segments, -1), axis=1), segments < 0


def _count_before(
    key_segment: Int[Array, "..."],
    key_position: Int[Array, "..."],
    segment: Int[Array, "..."],
    position: Int[Array, "..."],
) -> Int[Array, "b s"]:
    """How many keys have a (segment, position) below each query's, by bisection."""
    keys = jnp.broadcast_arrays(key_segment, key_position)
    wanted = jnp.broadcast_arrays(segment, position)
    batch = max(keys[0].shape[0], wanted[0].shape[0])
    keys = [jnp.broadcast_to(x, (batch, x.shape[1])) for x in keys]
    wanted = [jnp.broadcast_to(x, (batch, x.shape[1])) for x in wanted]
    t = keys[0].shape[1]
    below = jnp.zeros_like(wanted[0])
    above = jnp.full_like(wanted[0], t)
    for _ in range(math.ceil(math.log2(t + 1))):
        middle = (below + above) // 2
        at = jnp.minimum(middle, t - 1)
        key = [jnp.take_along_axis(x, at, axis=1) for x in keys]
        less = (key[0] < wanted[0]) | ((key[0] == wanted[0]) & (key[1] < wanted[1]))
        less &= middle < above
        below = jnp.where(less, middle + 1, below)
        above = jnp.where(less, above, middle)
    return below
