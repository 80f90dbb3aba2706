"""One step of a ring: attention of one rank's queries to the keys of one rank, and its gradients.

Under a causal mask in zigzag order all steps but a rank's own have the same work on every rank and
no mask: the later half of the queries sees the early half of the keys, and one of (early, early)
and (later, later) is wholly visible. XLA computes these two as a pair of blocks, for its loops then
have a length that is known; the kernels leave the other two out by themselves.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from colossax.pallas.attention import (
    Mask,
    Operands,
    Scoring,
    backward_block,
    block_implementation,
    forward_block,
    merge_blocks,
)

from .axes import Packing, RingAxes
from .order import Order, check_order, offsets_seen, positions_local


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How a scheme runs; what a trace depends on.

    Attributes:
        axes: The ring.
        order: How the sequence lies on its ranks, one of `Order`.
        implementation: Of each step, see `attend_block`.
    """

    axes: RingAxes
    order: str = Order.ZIGZAG
    implementation: str = "auto"

    def check(self, operands: Operands) -> None:
        """Refuse an order that is none, or cannot be had with these lengths.

        Raises:
            ValueError: In those cases.
        """
        for length in operands.lengths:
            check_order(self.order, length, self.axes.size)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Queries:
    """What stays on its device; the last three only backward."""

    q: Any
    positions: Any = None
    segments: Any = None
    dout: Any = None
    lse: Any = None
    delta: Any = None

    @classmethod
    def of(cls, operands: Operands, **backward: Array) -> "Queries":
        """With what the mask says of them."""
        mask = operands.masked
        return cls(q=operands.q, positions=mask.q_positions, segments=mask.q_segments, **backward)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Keys:
    """What travels."""

    k: Any
    v: Any
    positions: Any = None
    segments: Any = None
    valid: Any = None

    @classmethod
    def of(cls, operands: Operands) -> "Keys":
        """With what the mask says of them."""
        mask = operands.masked
        return cls(
            k=operands.k,
            v=operands.v,
            positions=mask.kv_positions,
            segments=mask.kv_segments,
            valid=mask.kv_valid,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """Attention of this rank's queries to the keys of one rank."""

    settings: Settings
    mask: Mask
    scoring: Scoring
    queries: Queries

    @classmethod
    def of(
        cls, settings: Settings, operands: Operands, scoring: Scoring, **backward: Array
    ) -> "Step":
        """Of a rank's operands; `backward` are the fields of `Queries` that only it has."""
        queries = Queries.of(operands, **backward)
        return cls(settings=settings, mask=operands.mask, scoring=scoring, queries=queries)

    def inner_offsets(self, keys: Keys) -> tuple[int, ...]:
        """Places along the inner ring that hold keys anybody sees."""
        axes = self.settings.axes
        if axes.outer_size > 1:
            return tuple(range(1, axes.inner_size))
        s, t = self.queries.q.shape[1], keys.k.shape[1]
        return offsets_seen(self.mask, s, t, axes.size, self.settings.order)

    def own_forward_local(self, keys: Keys) -> tuple[Array, Array]:
        """Output and log-partition over this rank's own keys."""
        return self._attend(*self._resident_local(keys), self.mask, None)

    def forward_local(
        self, keys: Keys, source: Int[Array, ""], carried: tuple[Array, Array]
    ) -> tuple[Array, Array]:
        """What is carried with the keys of rank `source`, not one's own, merged in."""
        queries, keys = self._arrived_local(keys, source)
        if not self._paired(queries, keys):
            return self._attend(queries, keys, self.mask, carried)
        early = source < self.settings.axes.source_local()
        queries, keys = _pair_queries(queries, early), _pair_keys(keys, early)
        outputs = self._attend(queries, keys, _past(self.mask), None)
        return merge_blocks(*carried, *_forward_of_pairs(*outputs, early))

    def own_backward_local(self, keys: Keys) -> tuple[Any, Any]:
        """Gradients through this rank's own keys: of q and scoring, and of k and v, packed."""
        return self._gradients(*self._resident_local(keys), self.mask, lambda x: x, lambda x: x)

    def backward_local(self, keys: Keys, source: Int[Array, ""]) -> tuple[Any, Any]:
        """Gradients through the keys of rank `source`, not one's own, likewise."""
        queries, keys = self._arrived_local(keys, source)
        if not self._paired(queries, keys):
            return self._gradients(queries, keys, self.mask, lambda x: x, lambda x: x)
        early = source < self.settings.axes.source_local()
        return self._gradients(
            _pair_queries(queries, early),
            _pair_keys(keys, early),
            _past(self.mask),
            functools.partial(_queries_of_pairs, early=early),
            functools.partial(_keys_of_pairs, early=early),
        )

    def _paired(self, queries: Queries, keys: Keys) -> bool:
        """Whether a step, but for the first, is two blocks without a mask, see above."""
        zigzag = self.settings.order == Order.ZIGZAG
        if not (zigzag and self.mask.causal and self._aligned(keys)):
            return False
        operands, named = self._operands(queries, keys, self.mask), self.settings.implementation
        return block_implementation(operands, self.scoring, implementation=named) == "xla"

    def _aligned(self, keys: Keys) -> bool:
        """Whether queries and keys of a rank are the same tokens, without positions given."""
        return self.mask.indexed and self.queries.q.shape[1] == keys.k.shape[1]

    def _resident_local(self, keys: Keys) -> tuple[Queries, Keys]:
        """Placed queries and own keys; without positions where those along the shard do as well.

        A mask that needs no data leaves its kernel more to know beforehand.
        """
        only_order = self.mask.left is None and not self.mask.right and not self.scoring.by_distance
        if self._aligned(keys) and (self.settings.order == Order.CONTIGUOUS or only_order):
            return self.queries, keys
        return self._placed_local(keys, self.settings.axes.source_local())

    def _arrived_local(self, keys: Keys, source: Array) -> tuple[Queries, Keys]:
        """Placed queries and keys, none before the keys are here.

        Else XLA would prepare the queries of all steps outside of loops at once, and hold them.
        """
        return jax.lax.optimization_barrier(self._placed_local(keys, source))

    def _placed_local(self, keys: Keys, source: Array) -> tuple[Queries, Keys]:
        """With natural indices for the positions that are needed and not given."""
        if not self.mask.ordered and not self.scoring.by_distance:
            return self.queries, keys
        axes, order, queries = self.settings.axes, self.settings.order, self.queries
        if queries.positions is None:
            indices = positions_local(
                axes.source_local(), length=queries.q.shape[1], ranks=axes.size, order=order
            )
            queries = dataclasses.replace(queries, positions=indices)
        if keys.positions is None:
            indices = positions_local(source, length=keys.k.shape[1], ranks=axes.size, order=order)
            keys = dataclasses.replace(keys, positions=indices)
        return queries, keys

    def _attend(
        self, queries: Queries, keys: Keys, mask: Mask, carried: tuple[Array, Array] | None
    ) -> tuple[Array, Array]:
        return forward_block(
            self._operands(queries, keys, mask),
            self.scoring,
            carried=carried,
            implementation=self.settings.implementation,
        )

    def _gradients(
        self, queries: Queries, keys: Keys, mask: Mask, of_queries: Any, of_keys: Any
    ) -> tuple[Any, Any]:
        gradients, of_scoring = backward_block(
            self._operands(queries, keys, mask),
            self.scoring,
            dout=queries.dout,
            lse=queries.lse,
            delta=queries.delta,
            implementation=self.settings.implementation,
        )
        dkv = of_keys(gradients.k), of_keys(gradients.v)
        return (of_queries(gradients.q), of_scoring), Packing.of(dkv).pack(dkv)

    def _operands(self, queries: Queries, keys: Keys, mask: Mask) -> Operands:
        mask = mask.changed(
            q_positions=queries.positions,
            kv_positions=keys.positions,
            q_segments=queries.segments,
            kv_segments=keys.segments,
            kv_valid=keys.valid,
            # Positions found here ascend: a shard is one or two chunks of the row, in order.
            ascending=self.mask.ascends,
        )
        return Operands(q=queries.q, k=keys.k, v=keys.v, mask=mask)


# ---- two halves in zigzag order ------------------------------------------------------------------
#
# A pair of blocks is one block of twice the batch: first (later queries, early keys), which is
# always visible, then (early, early) where the keys' rank comes before this one, else (later,
# later). A rank's first half is early, its second is late.


def _past(mask: Mask) -> Mask:
    """The mask where all keys come before all queries."""
    window = None if mask.left is None else (mask.left, None)
    return mask.changed(causal=False, window=window)


def _pair_queries(queries: Queries, early: Bool[Array, ""]) -> Queries:
    rows = queries.q.shape[0]

    def pair(x: Any, axis: int = 1) -> Any:
        first, second = _halves(x, rows, axis)
        return jnp.concatenate([second, jnp.where(early, first, second)])

    return Queries(
        q=pair(queries.q),
        positions=_unless_none(pair, queries.positions),
        segments=_unless_none(pair, queries.segments),
        dout=_unless_none(pair, queries.dout),
        lse=_unless_none(functools.partial(pair, axis=2), queries.lse),
        delta=_unless_none(functools.partial(pair, axis=2), queries.delta),
    )


def _pair_keys(keys: Keys, early: Bool[Array, ""]) -> Keys:
    rows = keys.k.shape[0]

    def pair(x: Array) -> Array:
        first, second = _halves(x, rows, 1)
        return jnp.concatenate([first, jnp.where(early, first, second)])

    return jax.tree.map(pair, keys)


def _unless_none(f: Callable[[Any], Any], x: Any) -> Any:
    return None if x is None else f(x)


def _halves(x: Array, rows: int, axis: int) -> list[Array]:
    return jnp.split(jnp.broadcast_to(x, (rows, *x.shape[1:])), 2, axis)


def _forward_of_pairs(out: Array, lse: Array, early: Bool[Array, ""]) -> tuple[Array, Array]:
    """A pair's two results as one over all queries of the rank."""
    (late_out, other_out), (late_lse, other_lse) = jnp.split(out, 2), jnp.split(lse, 2)
    for_early = jnp.where(early, other_lse, -jnp.inf)
    for_late = jnp.where(early, -jnp.inf, other_lse)
    late_out, late_lse = merge_blocks(late_out, late_lse, other_out, for_late)
    return (
        jnp.concatenate([other_out, late_out], axis=1),
        jnp.concatenate([for_early, late_lse], axis=2),
    )


def _queries_of_pairs(dq: Array, *, early: Bool[Array, ""]) -> Array:
    late, other = jnp.split(dq, 2)
    return jnp.concatenate([jnp.where(early, other, 0), late + jnp.where(early, 0, other)], axis=1)


def _keys_of_pairs(dk: Array, *, early: Bool[Array, ""]) -> Array:
    first, other = jnp.split(dk, 2)
    return jnp.concatenate([first + jnp.where(early, other, 0), jnp.where(early, 0, other)], axis=1)
