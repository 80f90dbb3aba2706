"""Attention of a group of each seat to its pages, and what it gives to each slot of them, added."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .codes import read_kept
from .paged import attend_groups, chosen_for
from .pages import KEYS_AT_ONCE, Pages, Scores, attend_pages

if TYPE_CHECKING:
    from .cache import ReadSlots

LOGITS_BYTES = 2**29
"""Of logits that the kernel keeps at once; where groups of all seats have more, some go first."""

SLOTS_AT_ONCE = 2048
"""Of a seat, whose logits become shares in one step of a loop; rounded down to pages."""


def attend_counted(
    q: Float[Array, "t k r h"],
    cache: dict[str, Array],
    mass: Float[Array, "l p c k"],
    layer: int | Int[Array, ""],
    pages: Pages,
    *,
    seat: Int[Array, " t"],
    position: Int[Array, " t"],
    scores: Scores,
    read: "ReadSlots",
    plain: bool,
    implementation: str = "auto",
) -> tuple[Float[Array, "t k r hv"], Float[Array, "l p c k"]]:
    """What tokens see, and the masses with what these gave to each slot:

        mass[slot, k] += sum over query heads of exp(logit - lse)    token by token, in order

    Args:
        q: Queries, by kv head.
        cache: `[layers, pages, slots, ...]`, whole, without `HEAVY`.
        mass: Of all layers.
        layer: Which.
        pages: Of its groups, the i-th is of tokens of the i-th seat, in order of position.
        seat: Of each token.
        position: The slot of each.
        scores: How keys are seen.
        read: Keys and values from what slots hold.
        plain: Whether it gives the cache's `k` and `v` as they are.
        implementation: Of `paged_attention`; `auto`: its kernel or, in its place, `attend_pages`.

    Raises:
        NotImplementedError: The implementation named does not take this call, says why.

    Cost: by the kernel one pass over keys and values, and `8 w r` bytes more for each slot and kv
    head that a group of w tokens sees. Else that of `attend_pages` and, for the masses, its keys
    and half of its FLOPs once more.
    """
    where = {"seat": seat, "position": position, "scores": scores}
    asked = {"plain": plain, "mass": True, "implementation": implementation}
    chosen = chosen_for(q, cache, pages, scores, **asked)
    if chosen is not None:
        return _in_one_pass(q, cache, mass, layer, pages, **where, implementation=chosen)
    seen, lse = attend_pages(q, cache, layer, pages, **where, read=read, with_lse=True)
    place = _places(pages.groups, position)

    def shares(asked: Array, place: Array, lse: Array, held: dict, slots: Array) -> Array:
        """`[w, k, c]` of one seat."""
        keys, _, scales, _ = read_kept(read, held, q.dtype)
        products = jnp.einsum(
            "wkrh,ckh->krwc", asked.astype(keys.dtype), keys, preferred_element_type=jnp.float32
        )
        products = products if scales is None else products * scales.T[:, None, None]
        logits, seen = scores(products, place, slots)
        found = jnp.where(seen, jnp.exp(logits - lse[..., None]), 0.0)
        return jnp.moveaxis(jnp.sum(found, axis=1), 0, 1)

    def given(begin: Array, rows: Array) -> Array:
        held = {name: x[layer, rows] for name, x in cache.items()}
        held = {name: x.reshape(len(rows), -1, *x.shape[3:]) for name, x in held.items()}
        each = mass.shape[2]
        slots = begin * each + jnp.arange(rows.shape[1] * each, dtype=jnp.int32)
        of_seats = jax.vmap(shares, in_axes=(0, 0, 0, 0, None))
        return of_seats(q[jnp.clip(pages.groups, 0)], place, lse, held, slots)

    at_once = -(-KEYS_AT_ONCE // mass.shape[2])
    return seen, _added(mass, layer, pages.table, place, at_once, given)


def _in_one_pass(
    q: Array,
    cache: dict[str, Array],
    mass: Array,
    layer: int | Array,
    pages: Pages,
    *,
    seat: Array,
    position: Array,
    scores: Scores,
    implementation: str,
) -> tuple[Array, Array]:
    """By an implementation of `paged_attention`, of as many seats at a time as logits may be."""
    (seats, w), most, each = pages.groups.shape, pages.table.shape[1], mass.shape[2]
    of_one = 4 * w * q.shape[1] * q.shape[2] * most * each
    seats_at_once = min(seats, max(1, LOGITS_BYTES // of_one))
    how = {"seat": seat, "position": position, "scores": scores, "implementation": implementation}

    def some(i: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        out, mass = state
        own = i * seats_at_once + jnp.arange(seats_at_once, dtype=jnp.int32)
        there, own = own < seats, jnp.minimum(own, seats - 1)
        groups = jnp.where(there[:, None], pages.groups[own], -1)
        own_pages = dataclasses.replace(pages, groups=groups)
        seen, found = attend_groups(q, cache, layer, own_pages, **how, mass=True)
        assert found.mass is not None
        shares = found.mass.of

        def given(begin: Array, rows: Array) -> Array:
            return shares(begin * each, rows.shape[1] * each)

        place = _places(groups, position)
        at_once = max(1, SLOTS_AT_ONCE // each)
        return out + seen, _added(mass, layer, pages.table[own], place, at_once, given)

    nothing = jnp.zeros((*q.shape[:3], cache["v"].shape[-1]), jnp.float32)
    return jax.lax.fori_loop(0, -(-seats // seats_at_once), some, (nothing, mass))


def _places(groups: Int[Array, "s w"], position: Int[Array, " t"]) -> Int[Array, "s w"]:
    """Slots of the tokens of groups; negative: none."""
    return jnp.where(groups >= 0, position[groups], -1)


def _added(
    mass: Float[Array, "l p c k"],
    layer: int | Int[Array, ""],
    table: Int[Array, "s n"],
    place: Int[Array, "s w"],
    at_once: int,
    given: Callable[[Array, Array], Array],
) -> Float[Array, "l p c k"]:
    """Masses with what tokens gave, some pages of each seat after the other.

    Args:
        mass: Of all layers.
        layer: Which.
        table: Rows of each seat.
        place: Slots of its tokens; negative: none.
        at_once: Pages.
        given: `[s, w, k, slots]` from the number of the first page and the rows of all seats.
    """
    rows, each, k = mass.shape[1:]
    seats, most = table.shape
    at_once = min(at_once, most)
    last = jnp.max(place, axis=1)

    def part(i: Array, mass: Array) -> Array:
        begin = jnp.minimum(i * at_once, most - at_once)
        columns = begin + jnp.arange(at_once, dtype=jnp.int32)
        chosen = table[:, columns]
        more = jnp.moveaxis(given(begin, chosen), 1, 0)
        old = mass[layer, chosen].reshape(seats, -1, k)
        # One after another, as decoding adds them.
        total, _ = jax.lax.scan(lambda x, y: (x + y, None), old, jnp.swapaxes(more, 2, 3))
        # Of the last part some may be those of the one before.
        there = (columns >= i * at_once) & (columns * each <= last[:, None])
        own = jnp.where(there, chosen, rows)
        return mass.at[layer, own].set(total.reshape(*chosen.shape, each, k), mode="drop")

    parts = jnp.max(-(-(last + 1) // (at_once * each)))
    return jax.lax.fori_loop(0, parts, part, mass)
