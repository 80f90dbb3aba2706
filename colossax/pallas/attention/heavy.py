"""Seats that keep the tokens which were looked at most, and a window: heavy hitters."""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .counted import attend_counted
from .kept import HEAVY, MASS, PLACE
from .pages import KEYS_AT_ONCE, Pages, Scores

if TYPE_CHECKING:
    from .cache import ReadSlots


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Heavy:
    """How much each seat keeps, in whole pages, and which tokens of a call are whose.

    A seat holds `heavy + window` pages. A token sees, for each kv head, what was kept when its own
    page began, and its page up to itself. When the next page begins, each kv head lets go of as
    many tokens as a page has: those that were looked at least of all that lie before the `window`
    pages up to the new one, of equals the older. Whose page it is depends on positions alone, so
    that no cut of a prompt changes what is kept. Keys stay turned as their positions in the text
    say.

    What lies where: the token at position p is in slot p while pages last; from then on in the last
    page, at its place there, and what is kept of that page goes where room was made.

    Attributes:
        heavy: `[seats]` int32: pages; 0: the seat keeps all.
        window: `[seats]` int32: pages up to and with the token's own.
        first: `[seats]` int32: which token of the call is the seat's first; they are side by side.
        count: `[seats]` int32: how many it has.
        start: `[seats]` int32: position of the first.
        page_tokens: Tokens of a page.

    Source: Zhang et al. 2023, H2O: Heavy-Hitter Oracle; there a token at a time makes room.
    """

    heavy: Int[Array, " seats"]
    window: Int[Array, " seats"]
    first: Int[Array, " seats"]
    count: Int[Array, " seats"]
    start: Int[Array, " seats"]
    page_tokens: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(
        cls,
        heavy: Int[Array, " seats"],
        window: Int[Array, " seats"],
        seat: Int[Array, " t"],
        position: Int[Array, " t"],
        page_tokens: int,
    ) -> "Heavy":
        """Of the tokens of a call; those of a seat side by side, in order of position."""
        seats, t = heavy.shape[0], seat.shape[0]
        row = jnp.where(seat < 0, seats, seat)
        at = jnp.arange(t, dtype=jnp.int32)
        first = jnp.full((seats,), t, jnp.int32).at[row].min(at, mode="drop")
        count = jnp.zeros((seats,), jnp.int32).at[row].add(1, mode="drop")
        start = position.at[first].get(mode="fill", fill_value=0)
        return cls(
            heavy=heavy,
            window=window,
            first=first,
            count=count,
            start=start,
            page_tokens=page_tokens,
        )

    @property
    def pages(self) -> Int[Array, " seats"]:
        """Most that a seat holds."""
        return self.heavy + self.window

    @property
    def rounds(self) -> Int[Array, ""]:
        """Pages that the tokens of one seat lie in, of the seat that has most."""
        last = (self.start + self.count - 1) // self.page_tokens
        pages = last - self.start // self.page_tokens + 1
        return jnp.max(jnp.where((self.heavy > 0) & (self.count > 0), pages, 0))

    def has(self, seat: Int[Array, " t"]) -> Bool[Array, " t"]:
        """Whether tokens are of seats that keep heavy hitters."""
        return (seat >= 0) & (self.heavy[jnp.clip(seat, 0)] > 0)

    def slot(self, seat: Int[Array, " t"], position: Int[Array, " t"]) -> Int[Array, " t"]:
        """Where in its seat each token goes."""
        own = jnp.clip(seat, 0)
        each, last = self.page_tokens, self.pages[own] - 1
        return jnp.minimum(position // each, last) * each + position % each

    def tokens(self, i: Array, width: int) -> Int[Array, "seats w"]:
        """Tokens of the i-th page of each seat, by place in it; negative: none.

        Args:
            i: From 0.
            width: Places of a page, or 1 where no seat has more than one token.
        """
        at = self.start[:, None]
        if width > 1 or self.page_tokens == 1:
            page = self.start // self.page_tokens + i
            at = page[:, None] * self.page_tokens + jnp.arange(width, dtype=jnp.int32)
        behind = at - self.start[:, None]
        there = (behind >= 0) & (behind < self.count[:, None]) & (self.heavy > 0)[:, None]
        return jnp.where(there, self.first[:, None] + behind, -1)


def attend_heavy(
    q: Float[Array, "t k r h"],
    new: dict[str, Array],
    cache: dict[str, Array],
    layer: int | Int[Array, ""],
    pages: Pages,
    others: Float[Array, "t k r hv"],
    *,
    seat: Int[Array, " t"],
    position: Int[Array, " t"],
    scores: Scores,
    read: "ReadSlots",
    plain: bool,
    implementation: str = "auto",
) -> tuple[Float[Array, "t k r hv"], dict[str, Array]]:
    """What all tokens see, those of seats that keep heavy hitters too, and the cache with them.

    Page by page of each seat: room is made, tokens are written, attend, and what each was given of
    them is added to its mass, token by token, so that it is one number however they were cut.

    Args:
        q: Queries, by kv head.
        new: What is kept of the tokens, as the cache keeps it.
        cache: `[layers, pages, slots, k, ...]`, whole; `MASS` and `PLACE` among them.
        layer: Which.
        pages: With `heavy`.
        others: What tokens of other seats see, and 0 for these. Made before the loop begins, for it
            writes what those read: else all of the cache would be copied.
        seat: Of each token.
        position: Of each token.
        scores: How keys are seen.
        read: Keys and values from what slots hold.
        plain, implementation: As of `attend_counted`.

    Raises:
        NotImplementedError: The implementation named does not take this call, says why.

    Cost: that of `attend_counted` for each page of the seat that has most tokens in the call, with
    a group for each seat. Masses and places are 8 bytes for each slot and kv head of a layer.
    """
    heavy = pages.heavy
    assert heavy is not None
    width = 1 if pages.groups.shape[1] == 1 else heavy.page_tokens
    slot, k = heavy.slot(seat, position), q.shape[1]
    where: dict[str, Any] = {"seat": seat, "position": slot, "scores": scores, "read": read}
    where |= {"plain": plain, "implementation": implementation}
    new = new | {
        MASS: jnp.zeros((len(seat), k), jnp.float32),
        PLACE: jnp.broadcast_to(position[:, None], (len(seat), k)),
    }

    def page(i: Array, state: Any) -> Any:
        out, cache = state
        members = heavy.tokens(i, width)
        begins = (members[:, 0] >= 0) & (position[members[:, 0]] % heavy.page_tokens == 0)
        number = position[members[:, 0]] // heavy.page_tokens
        cache = _room_made(cache, layer, pages, begins & (number >= heavy.pages), number)
        cache = _written(cache, layer, pages, new, members, slot)
        rest = {name: x for name, x in cache.items() if name not in HEAVY}
        groups = Pages(table=pages.table, groups=members)
        seen, mass = attend_counted(q, rest, cache[MASS], layer, groups, **where)
        return out + seen, {**cache, MASS: mass}

    return jax.lax.fori_loop(0, heavy.rounds, page, (others.astype(jnp.float32), cache))


def _written(
    cache: dict[str, Array],
    layer: Any,
    pages: Pages,
    new: dict[str, Array],
    members: Int[Array, "seats w"],
    slot: Int[Array, " t"],
) -> dict[str, Array]:
    """The cache with these tokens in their slots."""
    rows, each = cache[MASS].shape[1:3]
    at = slot[jnp.clip(members, 0)]
    row = jnp.where(members < 0, rows, jnp.take_along_axis(pages.table, at // each, axis=1))
    tokens = jnp.clip(members, 0)
    return {
        name: x.at[layer, row, at % each].set(new[name][tokens], mode="drop")
        for name, x in cache.items()
    }


def _room_made(
    cache: dict[str, Array],
    layer: Any,
    pages: Pages,
    full: Bool[Array, " seats"],
    page: Int[Array, " seats"],
) -> dict[str, Array]:
    """The cache with the last page of seats free, what is kept of it where others were let go.

    Args:
        cache: All of it.
        layer: Which.
        pages: With `heavy`.
        full: Which seats need room.
        page: That begins in each.
    """
    heavy, (rows, each, k) = pages.heavy, cache[MASS].shape[1:]
    assert heavy is not None
    last = jnp.maximum(heavy.pages - 1, 0)
    least = jnp.sort(_least(cache, layer, pages, full, page), axis=-1)
    begin = (last * each)[:, None, None]
    own = begin + jnp.arange(each, dtype=jnp.int32)
    stays = ~jnp.any(own[..., None] == least[:, :, None], axis=-1) & full[:, None, None]
    # Slots of earlier pages are the smaller numbers: as many as tokens of the last page stay.
    to = jnp.take_along_axis(least, jnp.maximum(jnp.cumsum(stays, axis=-1) - 1, 0), axis=-1)
    to = jnp.where(stays, to, 0)
    seats = jnp.arange(len(full), dtype=jnp.int32)
    row = jnp.where(stays, pages.table[seats[:, None, None], to // each], rows)
    row, column = (jnp.swapaxes(x, 1, 2) for x in (row, to % each))
    kv = jnp.arange(k, dtype=jnp.int32)
    from_row = pages.table[seats, last]
    return {
        name: x.at[layer, row, column, kv].set(x[layer, from_row], mode="drop")
        for name, x in cache.items()
    }


def _least(
    cache: dict[str, Array],
    layer: Any,
    pages: Pages,
    full: Bool[Array, " seats"],
    page: Int[Array, " seats"],
) -> Int[Array, "seats k each"]:
    """Slots that were looked at least of those before the window of a page, as many as it has."""
    heavy, (each, k) = pages.heavy, cache[MASS].shape[2:]
    assert heavy is not None
    seats, most = pages.table.shape
    at_once = min(most, -(-KEYS_AT_ONCE // each))
    before = ((page - heavy.window + 1) * each)[:, None, None]

    def part(i: Array, found: tuple[Array, ...]) -> tuple[Array, ...]:
        columns = i * at_once + jnp.arange(at_once, dtype=jnp.int32)
        chosen = pages.table[:, jnp.clip(columns, 0, most - 1)]
        mass, place = (
            jnp.swapaxes(cache[name][layer, chosen].reshape(seats, -1, k), 1, 2)
            for name in (MASS, PLACE)
        )
        slots = (columns[:, None] * each + jnp.arange(each, dtype=jnp.int32)).reshape(-1)
        held = slots < (heavy.pages * each)[:, None, None]
        mass = jnp.where(held & (place < before), mass, jnp.inf)
        here = mass, place, jnp.broadcast_to(slots, mass.shape)
        both = [jnp.concatenate(pair, axis=-1) for pair in zip(found, here, strict=True)]
        return tuple(x[..., :each] for x in jax.lax.sort(both, num_keys=2))

    none = jnp.zeros((seats, k, each), jnp.int32)
    found = (jnp.full(none.shape, jnp.inf, jnp.float32), none, none)
    parts = jnp.max(jnp.where(full, -(-heavy.pages // at_once), 0))
    return jax.lax.fori_loop(0, parts, part, found)[2]
