"""Ring attention: queries stay, keys and values travel around the devices.

One engine serves the single and the double ring, zigzag and contiguous order, every mask. Shapes
are those of one rank of R = O I: s queries and t keys, their natural indices given by the order.

A step is attention to one block of keys; its parts of the softmax are merged in float32. Under a
causal mask in zigzag order all steps but the first have the same work on every rank and no mask:
the later half of the queries sees the early half of the keys, and one of (early, early) and
(later, later) is wholly visible.

Reference: Liu et al. 2023, Ring Attention with Blockwise Transformers; the double ring is that of
Gu et al. 2024, LoongTrain.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from colossax.pallas.attention import (
    Mask,
    attend_block,
    block_gradients,
    merge_blocks,
    row_delta,
    with_sinks,
)

from .axes import Circle, Packing, RingAxes
from .order import Order, check_order, offsets_seen, positions_local


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Static:
    """What a trace depends on."""

    axes: RingAxes
    order: str
    scale: float
    soft_cap: float | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Queries:
    """What stays on its device; the last three only backward."""

    q: Any
    positions: Any = None
    segments: Any = None
    dout: Any = None
    lse: Any = None
    delta: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Keys:
    """What travels."""

    k: Any
    v: Any
    positions: Any = None
    segments: Any = None
    valid: Any = None


def ring_attention_local(
    q: Float[Array, "b s n h"],
    k: Float[Array, "b t k h"],
    v: Float[Array, "b t k hv"],
    *,
    mask: Mask,
    alibi_slopes: Float[Array, " n"] | None = None,
    scale: float,
    soft_cap: float | None = None,
    sinks: Float[Array, " n"] | None = None,
    axes: RingAxes,
    order: str = Order.ZIGZAG,
) -> tuple[Float[Array, "b s n hv"], Float[Array, "b n s"]]:
    """Exact softmax attention of one rank's queries to the keys of all R ranks.

    Positions that the mask leaves out are natural indices, which follow from rank and order. Arrays
    of the mask are this rank's part, those of keys travel along. Steps in which no rank sees a key
    through a window of natural indices are left out with their hops (single ring).

    Returns:
        Output in q's dtype and the float32 log-partition, sinks included; both differentiable.

    Raises:
        ValueError: The order is unknown or cannot be had with these lengths.

    Cost, per device: KV = b t k (h + hv) items of k's dtype. Forward sends (R - 1) KV; backward
    (R - 1) KV again and (R - 1) KV of float32 gradients; in a double ring O - 1 of the R - 1 hops
    run along the outer axis. Residuals are q, k, v, the output and 4 bytes per query and head.
    XLA may keep the forward pass's first hop for the backward pass where both are in one
    computation. tests/sharding/sequence/test_bytes.py counts all of it.
    """
    check_order(order, q.shape[1], axes.size)
    check_order(order, k.shape[1], axes.size)
    static = _Static(axes=axes, order=str(order), scale=scale, soft_cap=soft_cap)
    slopes = None if alibi_slopes is None else alibi_slopes.astype(jnp.float32)
    out, lse = _ring(static, q, k, v, slopes, mask)
    return (out, lse) if sinks is None else with_sinks(out, lse, sinks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(static: _Static, q: Any, k: Any, v: Any, slopes: Any, mask: Mask) -> Any:
    return _forward(static, q, k, v, slopes, mask)


def _ring_fwd(static: _Static, q: Any, k: Any, v: Any, slopes: Any, mask: Mask) -> Any:
    found = _forward(static, q, k, v, slopes, mask)
    out, lse = (checkpoint_name(x, "attention") for x in found)
    return (out, lse), (q, k, v, slopes, mask, out, lse)


def _ring_bwd(static: _Static, saved: Any, cotangents: Any) -> Any:
    q, k, v, slopes, mask, out, lse = saved
    dout, dlse = cotangents
    delta = row_delta(out, lse, dout, dlse)
    dq, dk, dv, dslopes = _backward(static, q, k, v, slopes, mask, dout, lse, delta)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), dslopes, None


_ring.defvjp(_ring_fwd, _ring_bwd)


# ---- around the ring -----------------------------------------------------------------------------


def _forward(
    static: _Static, q: Array, k: Array, v: Array, slopes: Any, mask: Mask
) -> tuple[Array, Array]:
    axes, keys = static.axes, _keys(k, v, mask)
    block = _Block(static=static, mask=mask, slopes=slopes, queries=_queries(q, mask))
    packing = Packing.of(keys)

    def visit(state: Any, packed: Any, a: Any, b: Any) -> Any:
        out, lse = block.forward_local(packing.unpack(packed), axes.source_local(a, b))
        return merge_blocks(state[0], state[1], out, lse)

    def sweep(state: Any, packed: Any, a: Any, offsets: Sequence[int]) -> Any:
        """Along the inner ring, with keys from `a` places back on the outer one."""
        return _travel(
            axes.inner_circle, packed, offsets, lambda s, p, b, _: visit(s, p, a, b), state
        )

    def outer_visit(state: Any, packed: Any, a: Any, _: int) -> Any:
        return sweep(visit(state, packed, a, 0), packed, a, range(1, axes.inner_size))

    packed = packing.pack(keys)
    state = sweep(block.own_forward_local(keys), packed, 0, block.inner_offsets(keys))
    out, lse = _travel(axes.outer_circle, packed, range(1, axes.outer_size), outer_visit, state)
    return out.astype(q.dtype), lse


def _backward(
    static: _Static,
    q: Array,
    k: Array,
    v: Array,
    slopes: Any,
    mask: Mask,
    dout: Array,
    lse: Array,
    delta: Array,
) -> tuple[Array, Array, Array, Any]:
    """All in float32.

    Gradients of keys follow one hop behind them, as the sum of what the visited devices added, and
    a last hop takes them home. What a device adds to the keys with which a ring starts does not
    travel along it: that is computed under the last hop, so that something hides it.
    """
    axes, keys = static.axes, _keys(k, v, mask)
    inner, outer = axes.inner_circle, axes.outer_circle
    queries = _queries(q, mask, dout=dout, lse=lse, delta=delta)
    block = _Block(static=static, mask=mask, slopes=slopes, queries=queries)
    packing = Packing.of(keys)

    def visit(of_queries: Any, packed: Any, a: Any, b: Any) -> tuple[Any, Any]:
        found, dkv = block.backward_local(packing.unpack(packed), axes.source_local(a, b))
        return _add(of_queries, found), dkv

    def sweep(of_queries: Any, packed: Any, a: Any, offsets: Sequence[int]) -> tuple[Any, Any]:
        """Along the inner ring, with keys from `a` places back on the outer one."""

        def inner_visit(state: Any, packed: Any, b: Any, hop: int) -> tuple[Any, Any]:
            of_queries, dkv = state
            moved = inner.shift_local(dkv, hop)
            of_queries, found = visit(of_queries, packed, a, b)
            return of_queries, _add(moved, found)

        state = (of_queries, None)
        of_queries, dkv = _travel(inner, packed, offsets, inner_visit, state, first_alone=True)
        return of_queries, inner.shift_local(dkv, axes.inner_size - max(offsets, default=0))

    def outer_visit(state: Any, packed: Any, a: Any, hop: int) -> tuple[Any, Any]:
        of_queries, dkv = state
        moved = outer.shift_local(dkv, hop)
        of_queries, travelled = sweep(of_queries, packed, a, range(1, axes.inner_size))
        of_queries, first = visit(of_queries, packed, a, 0)
        return of_queries, _add(moved, _add(travelled, first))

    packed, state = packing.pack(keys), (None, None)
    if axes.outer_size > 1:
        offsets = range(1, axes.outer_size)
        state = _travel(outer, packed, offsets, outer_visit, state, first_alone=True)
        state, packed = jax.lax.optimization_barrier((state, packed))
    of_queries, dkv = state
    dkv = outer.shift_local(dkv, 1)
    of_queries, travelled = sweep(of_queries, packed, 0, block.inner_offsets(keys))
    found, own = block.own_backward_local(keys)
    (dq, dslopes), dkv = _add(of_queries, found), _add(_add(dkv, travelled), own)
    return dq, *Packing.of((k, v)).unpack(dkv), dslopes


def _travel(
    circle: Circle,
    packed: tuple[Array, ...],
    offsets: Sequence[int],
    visit: Callable[[Any, Any, Any, int], Any],
    state: Any,
    *,
    first_alone: bool = False,
) -> Any:
    """Visit what lies `offset` places back, for each offset in ascending order.

    `visit(state, packed, offset, hop)` sees the arrays `hop` places after the visit before. Their
    next hop depends on no visit, so the compiler can hide it behind one. Visits between equal hops
    are the iterations of a loop; `first_alone` keeps the first out of it, for a state that only
    visits complete.
    """
    if not offsets:
        return state
    hops = np.diff([0, *offsets]).tolist()
    stops = list(zip(offsets, hops, [*hops[1:], 0], strict=True))
    alone = stops[0] if first_alone else None

    def stop(carry: Any, offset: Any, came: int, goes: int) -> Any:
        state, packed = carry
        following = circle.shift_local(packed, goes) if goes else packed
        return visit(state, packed, offset, came), following

    carry = state, circle.shift_local(packed, hops[0])
    for (_, came, goes), group in itertools.groupby(stops, lambda s: (s == alone, *s[1:])):
        # Else XLA would combine hops of several visits and wait for all of them at the first.
        carry = jax.lax.optimization_barrier(carry)
        places = [offset for offset, _, _ in group]
        if len(places) == 1:
            carry = stop(carry, places[0], came, goes)
        else:
            one = functools.partial(_scanned, stop, came, goes)
            carry, _ = jax.lax.scan(one, carry, jnp.asarray(places, jnp.int32))
    return carry[0]


def _scanned(stop: Callable[..., Any], came: int, goes: int, carry: Any, offset: Array) -> Any:
    return stop(carry, offset, came, goes), None


def _add(one: Any, two: Any) -> Any:
    """The sum of two trees, None being nothing."""
    if one is None or two is None:
        return two if one is None else one
    return jax.tree.map(jnp.add, one, two)


# ---- one step ------------------------------------------------------------------------------------


def _queries(q: Array, mask: Mask, **of_gradients: Array) -> _Queries:
    return _Queries(q=q, positions=mask.q_positions, segments=mask.q_segments, **of_gradients)


def _keys(k: Array, v: Array, mask: Mask) -> _Keys:
    return _Keys(
        k=k, v=v, positions=mask.kv_positions, segments=mask.kv_segments, valid=mask.kv_valid
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Block:
    """Attention of this rank's queries to the keys of one rank."""

    static: _Static
    mask: Mask
    slopes: Any
    queries: _Queries

    def inner_offsets(self, keys: _Keys) -> tuple[int, ...]:
        """Places along the inner ring that hold keys anybody sees."""
        axes = self.static.axes
        if axes.outer_size > 1:
            return tuple(range(1, axes.inner_size))
        s, t = self.queries.q.shape[1], keys.k.shape[1]
        return offsets_seen(self.mask, s, t, axes.size, self.static.order)

    def own_forward_local(self, keys: _Keys) -> tuple[Array, Array]:
        """Output and log-partition over this rank's own keys."""
        return self._attend(*self._placed_local(keys, self.static.axes.source_local()), self.mask)

    def forward_local(self, keys: _Keys, source: Int[Array, ""]) -> tuple[Array, Array]:
        """Output and log-partition over the keys of rank `source`, not one's own."""
        queries, keys = self._placed_local(keys, source)
        if not self._uniform(keys):
            return self._attend(queries, keys, self.mask)
        early = source < self.static.axes.source_local()
        queries, keys = _pair_queries(queries, early), _pair_keys(keys, early)
        return _forward_of_pairs(*self._attend(queries, keys, _past(self.mask)), early)

    def own_backward_local(self, keys: _Keys) -> tuple[Any, Any]:
        """Gradients through this rank's own keys: of q and slopes, and of k and v, packed."""
        placed = self._placed_local(keys, self.static.axes.source_local())
        return self._gradients(*placed, self.mask, lambda x: x, lambda x: x)

    def backward_local(self, keys: _Keys, source: Int[Array, ""]) -> tuple[Any, Any]:
        """Gradients through the keys of rank `source`, not one's own, likewise."""
        queries, keys = self._placed_local(keys, source)
        queries, keys = jax.lax.optimization_barrier((queries, keys))
        if not self._uniform(keys):
            return self._gradients(queries, keys, self.mask, lambda x: x, lambda x: x)
        early = source < self.static.axes.source_local()
        return self._gradients(
            _pair_queries(queries, early),
            _pair_keys(keys, early),
            _past(self.mask),
            functools.partial(_queries_of_pairs, early=early),
            functools.partial(_keys_of_pairs, early=early),
        )

    def _uniform(self, keys: _Keys) -> bool:
        """Whether all steps but the first have the same work on each rank, see above."""
        same = self.queries.q.shape[1] == keys.k.shape[1]
        zigzag = self.static.order == Order.ZIGZAG
        return zigzag and same and self.mask.causal and self.mask.indexed

    def _placed_local(self, keys: _Keys, source: Array) -> tuple[_Queries, _Keys]:
        """With natural indices for the positions that are needed and not given."""
        if not self.mask.ordered and self.slopes is None:
            return self.queries, keys
        axes, order, queries = self.static.axes, self.static.order, self.queries
        if queries.positions is None:
            found = positions_local(
                axes.source_local(), length=queries.q.shape[1], ranks=axes.size, order=order
            )
            queries = dataclasses.replace(queries, positions=found)
        if keys.positions is None:
            found = positions_local(source, length=keys.k.shape[1], ranks=axes.size, order=order)
            keys = dataclasses.replace(keys, positions=found)
        return queries, keys

    def _attend(self, queries: _Queries, keys: _Keys, mask: Mask) -> tuple[Array, Array]:
        return attend_block(queries.q, keys.k, keys.v, **self._options(queries, keys, mask))

    def _gradients(
        self, queries: _Queries, keys: _Keys, mask: Mask, of_queries: Any, of_keys: Any
    ) -> tuple[Any, Any]:
        dq, dk, dv, dslopes = block_gradients(
            queries.q,
            keys.k,
            keys.v,
            **self._options(queries, keys, mask),
            dout=queries.dout,
            lse=queries.lse,
            delta=queries.delta,
        )
        dkv = of_keys(dk), of_keys(dv)
        return (of_queries(dq), dslopes), Packing.of(dkv).pack(dkv)

    def _options(self, queries: _Queries, keys: _Keys, mask: Mask) -> dict[str, Any]:
        return {
            "mask": dataclasses.replace(
                mask,
                q_positions=queries.positions,
                kv_positions=keys.positions,
                q_segments=queries.segments,
                kv_segments=keys.segments,
                kv_valid=keys.valid,
            ),
            "alibi_slopes": self.slopes,
            "scale": self.static.scale,
            "soft_cap": self.static.soft_cap,
        }


# ---- two halves in zigzag order ------------------------------------------------------------------
#
# A pair of blocks is one block of twice the batch: first (later queries, early keys), which is
# always visible, then (early, early) where the keys' rank comes before this one, else (later,
# later). A rank's first half is early, its second is late.


def _past(mask: Mask) -> Mask:
    """The mask where all keys come before all queries."""
    window = None if mask.left is None else (mask.left, None)
    return dataclasses.replace(mask, causal=False, window=window)


def _pair_queries(queries: _Queries, early: Bool[Array, ""]) -> _Queries:
    rows = queries.q.shape[0]

    def pair(x: Any, axis: int = 1) -> Any:
        first, second = _halves(x, rows, axis)
        return jnp.concatenate([second, jnp.where(early, first, second)])

    return _Queries(
        q=pair(queries.q),
        positions=_unless_none(pair, queries.positions),
        segments=_unless_none(pair, queries.segments),
        dout=_unless_none(pair, queries.dout),
        lse=_unless_none(functools.partial(pair, axis=2), queries.lse),
        delta=_unless_none(functools.partial(pair, axis=2), queries.delta),
    )


def _pair_keys(keys: _Keys, early: Bool[Array, ""]) -> _Keys:
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
