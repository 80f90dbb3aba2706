"""Rows to the devices of their experts and back, and how often."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from colossax.sharding.experts.layout import Layout
from colossax.sharding.experts.slots import (
    Slots,
    Sorted,
    rows_per_device,
    slots_of,
)

PASSES = "experts_passes"
"""The scope in which loops over passes are traced: how often they run depends on the routing, so
that who counts a program must say what is taken for it."""


def assumed_turns(chunks: int | str) -> int:
    """Turns of a loop over passes where a balanced load takes as many as there are chunks.

    Of two or more the first and the last stand outside of the loop; of `auto` the number is that of
    a layer, and one turn is taken.
    """
    return max(chunks - 2, 0) if isinstance(chunks, int) and chunks > 1 else 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Route:
    """Where the choices of a device's tokens go, and what comes from other devices.

    Attributes:
        layout: Of the layer.
        found: The choices here.
        ends: `[sources, l]`: of each device that sends here, where the rows of each expert end.
        rows: `[g]`, that come from each device of the group.
        count: Passes, the same on all devices.
    """

    layout: Layout
    found: Sorted
    ends: Int[Array, "sources l"]
    rows: Int[Array, " g"]
    count: Array | int

    def taken(self, number: Array | int) -> Slots:
        """Slots of a pass's buffer."""
        return slots_of(self.found, self.layout.destinations, self.layout.slots, number)

    def arriving(self, number: Array | int) -> Int[Array, "sources l"]:
        """Rows of each expert that a pass brings from each device."""
        slots = self.layout.slots
        ends = jnp.clip(self.ends - number * slots, 0, slots)
        return jnp.diff(ends, axis=1, prepend=0)

    def filled(self, number: Array | int) -> tuple[Int[Array, " g"], Int[Array, " g"]]:
        """Rows that a pass sends to each device of the group, and gets from it."""
        slots = self.layout.slots
        to = rows_per_device(self.found, self.layout.destinations)
        sent, got = (jnp.clip(each - number * slots, 0, slots) for each in (to, self.rows))
        return sent.astype(jnp.int32), got.astype(jnp.int32)


def route_local(layout: Layout, found: Sorted) -> Route:
    """The route of a device's choices.

    Cost: the number of rows for each expert by all-to-all, once for all passes.
    """
    counts = own = jnp.diff(found.ends)
    if layout.sends:
        own = _exchanged_local(layout, counts, inner_first=True)
        counts = _gathered_local(layout, own)
    ends, own_ends = (
        jnp.cumsum(each.reshape(-1, layout.experts_here), axis=1) for each in (counts, own)
    )
    count = _passes_local(layout, found)
    return Route(layout=layout, found=found, ends=ends, rows=own_ends[:, -1], count=count)


def sent_local(layout: Layout, route: Route, x: Array, number: Array | int) -> Array:
    """Of a pass's buffer each part where its experts are, from all devices, in their order.

    Its transpose is `returned_local`.
    """
    if not layout.sends:
        return x
    if layout.way == "ragged" and x.ndim > 1:
        return _ragged_local(layout, x, *route.filled(number))
    return _gathered_local(layout, _exchanged_local(layout, x, inner_first=True))


def returned_local(layout: Layout, route: Route, x: Array, number: Array | int) -> Array:
    """What a pass sent, back; parts of a sum over features are summed."""
    if not layout.sends:
        return x
    if layout.way == "ragged" and x.ndim > 1:
        return _ragged_local(layout, x, *route.filled(number)[::-1])
    if layout.features:
        x = jax.lax.psum_scatter(x, layout.features, tiled=True)
    return _exchanged_local(layout, x, inner_first=False)


def _ragged_local(layout: Layout, x: Array, sent: Array, got: Array) -> Array:
    """`_exchanged_local` of the slots that are filled alone; others come back as zeros.

    Nothing here is differentiated, so that no gradient of the zeros is summed over devices.
    """
    first = jnp.arange(layout.destinations, dtype=jnp.int32) * layout.slots
    mine = jax.lax.axis_index(layout.group) * layout.slots
    there = jnp.full_like(first, mine)
    into = jax.lax.stop_gradient(jnp.zeros_like(x))
    return jax.lax.ragged_all_to_all(x, into, first, sent, there, got, axis_name=layout.group)


def _gathered_local(layout: Layout, x: Array) -> Array:
    """Of all devices that have a part of the same experts."""
    return jax.lax.all_gather(x, layout.features, tiled=True) if layout.features else x


def _exchanged_local(layout: Layout, x: Array, *, inner_first: bool) -> Array:
    """Of each device of the group its part of dim 0, in their order."""
    if layout.destinations == 1:
        return x
    if not layout.hierarchical:
        return jax.lax.all_to_all(x, layout.group, split_axis=0, concat_axis=0, tiled=True)
    outer, inner = layout.group[:1], layout.group[1:]
    sizes = (layout.size(outer), layout.size(inner))
    x = x.reshape(*sizes, -1, *x.shape[1:])
    for dim in (1, 0) if inner_first else (0, 1):
        axes = (outer, inner)[dim]
        x = jax.lax.all_to_all(x, axes, split_axis=dim, concat_axis=dim, tiled=True)
    return x.reshape(-1, *x.shape[3:])


def in_passes(
    layout: Layout,
    count: Array | int,
    send: Callable[[Array | int], Any],
    compute: Callable[[Array | int, Any, Any], tuple[Any, Any]],
    receive: Callable[[Array | int, Any, Any], Any],
    start: Any,
) -> Any:
    """Each pass sent, computed and received: one after another, or as `_pipelined` where asked.

    Args:
        layout: Of the layer.
        count: Passes, the same on all devices.
        send: Of a pass: what its experts are given.
        compute: From number, that and the totals: what comes back, and the totals.
        receive: From number, that and the totals: the totals.
        start: The totals before.
    """
    if layout.pipelined:
        return _pipelined(count, send, compute, receive, start)

    def one(number: Array | int, totals: Any) -> Any:
        made, totals = compute(number, send(number), totals)
        return receive(number, made, totals)

    if layout.passes == 1:
        return one(0, start)

    def body(carry: Any) -> Any:
        number, totals = carry
        return number + 1, one(number, totals)

    return _repeated(count, body, (jnp.int32(0), start))[1]


def _repeated(end: Array | int, body: Callable, carry: Any) -> Any:
    """`body` of what is carried, a number first, until that is `end`."""
    with jax.named_scope(PASSES):
        return jax.lax.while_loop(lambda carry: carry[0] < end, body, carry)


def _pipelined(
    count: Array | int, send: Callable, compute: Callable, receive: Callable, start: Any
) -> Any:
    """While pass i is computed, i + 1 is sent and i - 1 comes back: none waits for another.

    The first and the last pass, of two or more, stand outside of the loop, so that nothing is sent
    in vain.
    """
    given = send(0)
    ahead = send(1)
    made, totals = compute(0, given, start)

    def body(carry: Any) -> Any:
        number, given, made, totals = carry
        ahead = send(number + 1)
        totals = receive(number - 1, made, totals)
        made, totals = compute(number, given, totals)
        return number + 1, ahead, made, totals

    carry = (jnp.int32(1), ahead, made, totals)
    _, given, made, totals = _repeated(count - 1, body, carry)
    totals = receive(count - 2, made, totals)
    made, totals = compute(count - 1, given, totals)
    return receive(count - 1, made, totals)


def _passes_local(layout: Layout, found: Sorted) -> Array | int:
    """How many all devices take: as many as the fullest, on any of them."""
    if layout.way == "capacity" or layout.passes == 1:
        return layout.passes
    rows = jnp.max(rows_per_device(found, layout.destinations))
    needed = -(-rows // layout.slots)
    assert layout.bound is not None
    needed = jax.lax.pmax(needed, layout.bound.mesh.axis_names)
    return jnp.maximum(needed, 2) if layout.pipelined else needed


def dropped_local(layout: Layout, found: Sorted) -> Array:
    """Choices that no pass takes, on all devices."""
    if layout.way != "capacity" or layout.bound is None:
        return jnp.float32(0)
    over = rows_per_device(found, layout.destinations) - layout.slots * layout.passes
    sent = (*layout.tokens[0], *layout.tokens[1], *layout.sliced)
    return jax.lax.psum(jnp.sum(jnp.maximum(over, 0)).astype(jnp.float32), sent)
