"""Masks of a rank's steps: which of other ranks' keys its queries see, known before any key comes.

Natural indices follow from rank and order; segments, positions given and `kv_valid` of other ranks
are gathered, int32 or bool of the whole row. So keys and values alone travel, and layers that share
a mask can share all of this (`colossax.sharding.with_ranges`).
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from colossax.pallas.attention import (
    Mask,
    Operands,
    Scoring,
    block_implementation,
    block_ranges,
)

from .order import Order, offsets_seen, positions_local
from .pairs import pair_keys, pair_queries, past
from .settings import Settings

_OF_KEYS = ("kv_positions", "kv_segments", "kv_valid")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RingMasks:
    """Masks of one rank's steps; all arrays have a dim of 1 in front, for the devices of a mesh.

    Attributes:
        own: Of its queries and its own keys; of all keys where a scheme gathers those.
        others: Those of the steps that follow, stacked behind that dim; or None.
        early: bool: of these steps, whether the rank of their keys comes before this one; or None.
        offsets: How many places back, along the inner ring and then the outer one, the keys of
            these steps lie.
        paired: Whether `others` are of pairs of halves, see pairs.py.
        made_for: What else they depend on.
    """

    own: Any
    others: Any = None
    early: Any = None
    offsets: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})
    paired: bool = dataclasses.field(default=False, metadata={"static": True})
    made_for: Any = dataclasses.field(metadata={"static": True})

    @property
    def of_own(self) -> Mask:
        """That of the rank's own keys, or of all."""
        return _picked(self.own, jnp.zeros((), jnp.int32))

    def of_step(self, number: int | Int[Array, ""]) -> tuple[Mask, Bool[Array, ""]]:
        """Mask of the step of this number, from 1, and whether its keys' rank comes before."""
        step = jnp.asarray(number - 1, jnp.int32)
        others, early = jax.tree.map(lambda x: jnp.squeeze(x, 0), (self.others, self.early))
        return _picked(others, step), early[step]


def ring_masks_local(
    settings: Settings, operands: Operands, scoring: Scoring, *, ranges: bool = False
) -> RingMasks:
    """Of all steps of `ring_attention_local`: those that its mask carries, or made here.

    Args:
        settings: As of the ring.
        operands: As of the ring; q, k and v may be shapes.
        scoring: As of the ring; arrays may be shapes.
        ranges: Whether masks are to carry what the steps' implementation computes of them.

    Cost, for a ring of R ranks of s queries and t keys: gathers the mask's arrays of keys, 1 to 4
    bytes a token of a row; b R (s + t) int32 of each kind of array, with ranges about twice.
    """
    made_for = _made_for(settings, operands, scoring, "ring")
    carried = operands.masked.ranges
    if isinstance(carried, RingMasks) and carried.made_for == made_for:
        return carried
    steps = _Steps(settings=settings, operands=operands, scoring=scoring)
    own, offsets = steps.ranged(steps.own_local(), ranges), steps.offsets()
    made = RingMasks(own=own, offsets=offsets, made_for=made_for)
    if offsets:
        places = jnp.asarray(np.divmod(np.asarray(offsets, np.int32), settings.axes.inner_size))
        sources = jax.vmap(settings.axes.source_local)(*places)
        early = sources < settings.axes.source_local()
        of_keys = {name: x[sources] for name, x in _gathered(settings, operands.masked).items()}
        paired = steps.paired()
        others = jax.vmap(functools.partial(steps.other_local, paired=paired, ranges=ranges))(
            sources, early, of_keys
        )
        made = dataclasses.replace(made, others=others, early=early, paired=paired)
    return jax.tree.map(lambda x: x[None], made)


def gathered_masks_local(
    settings: Settings, operands: Operands, scoring: Scoring, *, ranges: bool = False
) -> RingMasks:
    """Of `gather_attention_local`, its keys in natural order; otherwise as `ring_masks_local`."""
    made_for = _made_for(settings, operands, scoring, "all_gather")
    mask, axes, order = operands.masked, settings.axes, settings.order
    if isinstance(mask.ranges, RingMasks) and mask.ranges.made_for == made_for:
        return mask.ranges
    of_keys = {name: natural(x, order=order) for name, x in _gathered(settings, mask).items()}
    if mask.q_positions is None and (mask.ordered or scoring.by_distance):
        of_keys["q_positions"] = positions_local(
            axes.source_local(), length=operands.lengths[0], ranks=axes.size, order=order
        )
    own = mask.changed(ascending=mask.ascends, **of_keys)
    if ranges:
        k, v = (_shape(x, x.shape[0], axes.size * x.shape[1]) for x in (operands.k, operands.v))
        full = operands.replace(k=k, v=v, mask=own)
        own = block_ranges(full, scoring, implementation=settings.implementation)
    return RingMasks(own=jax.tree.map(lambda x: x[None], own), made_for=made_for)


def natural(x: Array, *, order: str) -> Array:
    """`[R, b, t, ...]`, shard by shard, as `[b, R t, ...]` in natural order of tokens."""
    if order == Order.ZIGZAG:
        first, second = jnp.split(x, 2, axis=2)
        x = jnp.concatenate([first, second[::-1]])
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _picked(masks: Mask, step: Int[Array, ""]) -> Mask:
    """One of stacked masks; an implementation may pick by itself what it has of a step."""

    def pick(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, step, keepdims=False), tree)

    by_itself = getattr(masks.ranges, "of_step", None)
    ranges = pick(masks.ranges) if by_itself is None else by_itself(step)
    return pick(masks.changed()).changed(ranges=ranges)


def _made_for(settings: Settings, operands: Operands, scoring: Scoring, form: str) -> Any:
    by_place = scoring.dropout is not None
    return form, settings, operands.lengths, scoring.by_distance, by_place


def _gathered(settings: Settings, mask: Mask) -> dict[str, Array]:
    """Of all ranks, `[R, b or 1, t]`: the mask's arrays of keys, those that there are."""
    given = {name: getattr(mask, name) for name in _OF_KEYS}
    names = settings.axes.circle.names
    return {name: jax.lax.all_gather(x, names) for name, x in given.items() if x is not None}


def _shape(x: Any, rows: int, length: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, length, *x.shape[2:]), x.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Steps:
    """Makes the masks of one rank's steps."""

    settings: Settings
    operands: Operands
    scoring: Scoring

    @property
    def mask(self) -> Mask:
        return self.operands.masked

    @property
    def aligned(self) -> bool:
        """Whether queries and keys of a rank are the same tokens, without positions given."""
        s, t = self.operands.lengths
        return self.mask.indexed and s == t

    def offsets(self) -> tuple[int, ...]:
        """Places back at which keys lie that anybody sees."""
        axes = self.settings.axes
        if axes.outer_size > 1:
            return tuple(range(1, axes.size))
        return offsets_seen(self.mask, *self.operands.lengths, axes.size, self.settings.order)

    def paired(self) -> bool:
        """Whether a step, but for the first, is two blocks without a mask.

        So for XLA, whose loops then have a length that is known; kernels leave the other two
        quarters out by themselves.
        """
        zigzag = self.settings.order == Order.ZIGZAG
        if not (zigzag and self.mask.causal and self.aligned):
            return False
        named = self.settings.implementation
        return block_implementation(self.operands, self.scoring, implementation=named) == "xla"

    def own_local(self) -> Mask:
        """Without positions where those along the shard do as well: not where places are hashed.

        A mask that needs no data leaves its kernel more to know beforehand.
        """
        mask = self.mask
        only_order = mask.left is None and not mask.right and not self.scoring.by_distance
        plain = mask.changed(ascending=mask.ascends)
        alike = self.settings.order == Order.CONTIGUOUS or only_order
        if self.aligned and alike and self.scoring.dropout is None:
            return plain
        return self._placed_local(plain, self.settings.axes.source_local())

    def other_local(
        self,
        source: Int[Array, ""],
        early: Bool[Array, ""],
        of_keys: Mapping[str, Array],
        *,
        paired: bool,
        ranges: bool,
    ) -> Mask:
        """That of the keys of rank `source`, not one's own."""
        mask = self.mask.changed(ascending=self.mask.ascends, **of_keys)
        if not paired:
            return self.ranged(self._placed_local(mask, source), ranges)
        kind = past(mask)
        if kind.ordered or self.scoring.by_distance:
            mask = self._placed_local(mask, source)
        rows = self.operands.q.shape[0]
        halves = {
            name: (pair_queries if name[0] == "q" else pair_keys)(x, early, rows)
            for name in ("q_positions", "q_segments", *_OF_KEYS)
            if (x := getattr(mask, name)) is not None
        }
        return self.ranged(past(mask).changed(**halves), ranges, paired=True)

    def ranged(self, mask: Mask, ranges: bool, *, paired: bool = False) -> Mask:
        """The mask of such a step, carrying its ranges if they are wanted."""
        if not ranges:
            return mask
        q, k, v = self.operands.q, self.operands.k, self.operands.v
        if paired:
            q, k, v = (_shape(x, 2 * x.shape[0], x.shape[1] // 2) for x in (q, k, v))
        block = Operands(q=q, k=k, v=v, mask=mask)
        return block_ranges(block, self.scoring, implementation=self.settings.implementation)

    def _placed_local(self, mask: Mask, source: Int[Array, ""]) -> Mask:
        """With natural indices for the positions that are needed and not given."""
        if not self.mask.ordered and not self.scoring.by_distance:
            return mask
        axes, (s, t) = self.settings.axes, self.operands.lengths
        place = functools.partial(positions_local, ranks=axes.size, order=self.settings.order)
        q, kv = mask.q_positions, mask.kv_positions
        return mask.changed(
            q_positions=place(axes.source_local(), length=s) if q is None else q,
            kv_positions=place(source, length=t) if kv is None else kv,
        )
