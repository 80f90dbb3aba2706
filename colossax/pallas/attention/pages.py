"""Attention of flat tokens to pages that their seats hold, in its plain form."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from .codes import read_kept, without_scales
from .kept import Kept, PassedOver
from .mask import Mask
from .relative import RelativeBias

if TYPE_CHECKING:
    from .cache import ReadSlots
    from .heavy import Heavy

KEYS_AT_ONCE = 128
"""Slots of a seat that a step of the loop reads; rounded up to pages."""

_NONE = -1e30
"""What stands for the largest of no logits: its difference from itself is no NaN."""


WORD = 32
"""Slots that a word of `Branches` speaks of."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Branches:
    """Of tokens that are guessed, several for one position: a tree of them in each seat.

    A seat's tree lies in the slots from `begin` on, parents before children; the root is the last
    token that is said. A token sees all slots before the tree, and in it those of its own line.

    Attributes:
        begin: The first slot of each seat's tree, `[seats]` int32.
        depth: How far below the root what lies in each slot is, `[seats, nodes]` int32.
        line: Which slots each token of the call sees, itself among them, a bit each from the lowest
            of the first word, `[t, words]` uint32; all of them for tokens of no tree.
    """

    begin: Int[Array, "*seats"]
    depth: Int[Array, "*seats nodes"]
    line: UInt32[Array, "*t words"]

    def of_groups(self, tokens: Int[Array, "g w"], seats: Int[Array, " g"]) -> "Branches":
        """For each group of tokens: `begin [g]`, `depth [g, nodes]`, `line [g, w, words]`."""
        return Branches(begin=self.begin[seats], depth=self.depth[seats], line=self.line[tokens])

    def keys(self, slot: Int[Array, " c"]) -> tuple[Array, Array]:
        """Of one group: the position of what lies in slots `[c]`, and who sees it, `[w, c]`."""
        node = slot - self.begin
        nodes = self.depth.shape[0]
        in_tree = (node >= 0) & (node < nodes)
        held = jnp.clip(node, 0, nodes - 1)
        position = jnp.where(in_tree, self.begin + self.depth[held], slot)
        bit = (self.line[:, held // WORD] >> (held % WORD).astype(jnp.uint32)) & 1
        return position, (node < 0) | (in_tree & (bit == 1))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Pages:
    """Where the tokens of a call find what was kept of their sequences.

    A page is a row of the cache, of as many slots as the cache has, which any seat may hold.

    Attributes:
        table: `[seats, pages]` int32: rows of the cache that a seat holds, in order of position.
            Those behind what has been written are read nowhere.
        groups: `[g, w]` int32: tokens of the call, which read together; those of a row are of one
            seat. Negative: none. Each token of a seat stands in one place.
        branches: Of guessed tokens, where they are trees; else slots are positions.
        ring: Mesh axes, of size r together, that share the pages: page p is in row p // r of the
            device p mod r. Within a region that is manual over them; none: all are here.
        rings: Of layers whose tokens see so many keys strictly before them and no more, how many
            rows each seat has for itself, `(keys, rows)`, in place of the table: page p of seat s
            is in the row `s * rows + p % rows`. Keys, and tokens of a seat in one call, fit in.
        kept: Of seats that let go of pages between their first ones and a window; None: no seat of
            the cache does. Layers of rings, or of a window or chunks, have none.
        heavy: Of seats that keep heavy hitters, likewise; with it none lets go of pages.
    """

    table: Int[Array, "seats pages"]
    groups: Int[Array, "g w"]
    branches: Branches | None = None
    kept: Kept | None = None
    heavy: "Heavy | None" = None
    ring: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})
    rings: tuple[tuple[int, int], ...] = dataclasses.field(default=(), metadata={"static": True})

    def rows(self, seat: Array, page: Array, reach: int | None) -> Array:
        """Rows that hold these pages of seats.

        Args:
            seat, page: Of each, within the table.
            reach: Keys that tokens of the layer see strictly before them; None: all.
        """
        ring = None if reach is None else dict(self.rings).get(reach)
        if ring is not None:
            return seat * ring + page % ring
        return self.table[seat, page if self.kept is None else self.kept.place(seat, page)]

    def row_and_column(
        self,
        seat: Int[Array, " t"],
        slot: Int[Array, " t"],
        shape: tuple[int, ...],
        reach: int | None,
    ) -> tuple[Array, Array]:
        """Page and place in it of each token, out of range where there is none.

        Args:
            seat: Of each; negative is padding.
            slot: Of each, counted in its sequence; negative: it is not kept.
            shape: Of the cache, `[layers, pages, slots, ...]`.
            reach: See `rows`.
        """
        pages, each = shape[1:3]
        seats, most = self.table.shape
        page = slot // each
        there = (seat >= 0) & (slot >= 0) & (page < most)
        row = self.rows(jnp.clip(seat, 0, seats - 1), jnp.clip(page, 0, most - 1), reach)
        if self.ring:
            there &= row % jax.lax.axis_size(self.ring) == jax.lax.axis_index(self.ring)
            row = row // jax.lax.axis_size(self.ring)
        return jnp.where(there, row, pages), jnp.where(there, slot % each, 0)

    def held(self, reach: int | None) -> tuple[Array, Array]:
        """The pages of each seat that are here: their rows, and which of the seat's pages they are.

        `[seats, pages]` both; those that are elsewhere come last, as pages that no token sees.

        Args:
            reach: See `rows`.
        """
        seats, most = self.table.shape
        number = jnp.broadcast_to(jnp.arange(most, dtype=jnp.int32), (seats, most))
        if not self.ring:
            return self.rows(jnp.arange(seats, dtype=jnp.int32)[:, None], number, reach), number
        size = jax.lax.axis_size(self.ring)
        away = self.table % size != jax.lax.axis_index(self.ring)
        order = jnp.argsort(away, axis=1, stable=True)
        number = jnp.where(away, most, number)
        return (
            jnp.take_along_axis(self.table // size, order, axis=1),
            jnp.take_along_axis(number, order, axis=1),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """How products of queries and keys become logits, and which are seen.

    Attributes:
        scale: Of the products.
        left: Keys seen strictly before a token; None: all.
        chunk: A token sees keys of its own chunk of so many positions; None: of all.
        soft_cap: Bound of the logits.
        slopes: Penalty per unit of distance, `[k, g]`.
        sinks: One more logit of each head, `[k, g]` float32.
        biases: Of the distance.
    """

    scale: float
    left: int | None
    chunk: int | None
    soft_cap: float | None
    slopes: Array | None
    sinks: Array | None
    biases: Sequence[RelativeBias]

    @property
    def reach(self) -> int | None:
        """Most keys that any token sees strictly before it; None: all."""
        return min((x for x in (self.left, self._of_chunk) if x is not None), default=None)

    @property
    def _of_chunk(self) -> int | None:
        return None if self.chunk is None else self.chunk - 1

    def __call__(
        self, products: Float[Array, "k g w c"], query: Int[Array, " w"], key: Int[Array, " c"]
    ) -> tuple[Array, Array]:
        """Logits, and `[w, c]` which of them are seen, of positions."""
        logits = products * self.scale
        if self.soft_cap is not None:
            logits = self.soft_cap * jnp.tanh(logits / self.soft_cap)
        distance = query[:, None] - key
        if self.slopes is not None:
            logits = logits - self.slopes[..., None, None] * distance.astype(jnp.float32)
        for bias in self.biases:
            logits = logits + bias.of(query, key).reshape(logits.shape)
        seen = distance >= 0
        if self.left is not None:
            seen &= distance <= self.left
        if self.chunk is not None:
            seen &= distance <= (query % self.chunk)[:, None]
        return logits, seen


def attend_pages(
    q: Float[Array, "t k r h"],
    cache: dict[str, Array],
    layer: int | Int[Array, ""],
    pages: Pages,
    *,
    seat: Int[Array, " t"],
    position: Int[Array, " t"],
    scores: Scores,
    read: "ReadSlots",
    slot: Int[Array, " t"] | None = None,
    sink_q: Float[Array, "t k r h"] | None = None,
    with_lse: bool = False,
) -> Any:
    """What tokens see of their own seats' pages, up to their positions; float32.

    Softmax is summed up over parts of the keys, from the first that a group sees to the last: as
    many parts as the group needs that needs most. A part that a group does not see changes none
    of its numbers, so that what a token gets does not depend on who else is in the call.

    Args:
        q: Queries, by kv head.
        cache: `[layers, pages, slots, ...]`, whole; what the tokens bring is in it.
        layer: Which.
        pages: See there.
        seat: Of each token; negative is padding, and its output 0.
        position: Of each token.
        scores: How they are seen.
        read: Keys and values from what slots hold.
        slot: Where each token lies, where those of trees are among them; else its position.
        sink_q: Queries as they meet the first pages of seats that keep a window beside them,
            turned by as much as those are closer; None: as they meet others.
        with_lse: Whether the log-partitions of groups are given too, `[g, k, r, w]`; infinity for
            what sees nothing.

    Cost: 4 g w n h FLOPs for each slot that the longest group sees, rounded up to `KEYS_AT_ONCE`;
    keys and values of those are gathered once for each group. Over a ring of r devices each reads
    the pages that it holds, about 1 / r of them, and sums `g w n (h + 1)` numbers over the ring.
    """
    each = next(iter(cache.values())).shape[2]
    seats, most = pages.table.shape
    at_once = min(most, -(-KEYS_AT_ONCE // each))
    width = at_once * each
    there = (pages.groups >= 0) & (seat[pages.groups] >= 0)
    place = jnp.where(there, position[pages.groups], -1)
    first = jnp.min(jnp.where(there, place, most * each), axis=1)
    own = jnp.clip(jnp.max(jnp.where(there, seat[pages.groups], 0), axis=1), 0)
    trees, last = None, jnp.max(place, axis=1)
    if pages.branches is not None and slot is not None:
        trees = pages.branches.of_groups(jnp.clip(pages.groups, 0), own)
        last = jnp.max(jnp.where(there, slot[pages.groups], -1), axis=1)
    passed = PassedOver.of(pages.kept, own, first, last)
    if passed is None:
        rows, numbers = (x[own] for x in pages.held(scores.reach))
    else:
        numbers = passed.pages(most)
        rows = pages.rows(own[:, None], jnp.clip(numbers, 0, most - 1), None)
    begin = jnp.zeros_like(first)
    if scores.reach is not None:
        least = jnp.maximum(0, first - scores.reach) // each
        begin = jnp.sum(numbers < least[:, None], axis=1, dtype=jnp.int32) // at_once
    seen_pages = jnp.sum(numbers * each <= last[:, None], axis=1, dtype=jnp.int32)
    parts = jnp.max(jnp.where(last < 0, 0, -(-seen_pages // at_once) - begin))
    asked = q[jnp.clip(pages.groups, 0)]
    sinking = None if sink_q is None else sink_q[jnp.clip(pages.groups, 0)]

    def multiplied(asked: Array, keys: Array) -> Array:
        return jnp.einsum(
            "wkrh,ckh->krwc", asked.astype(keys.dtype), keys, preferred_element_type=jnp.float32
        )

    def attended(
        asked: Array,
        sinking: Array | None,
        seat: Array,
        place: Array,
        kept: Any,
        slots: Array,
        tree: Any,
    ) -> Any:
        """Largest logit, sum of exponentials and weighted values of one part."""
        keys, values, key_scales, value_scales = kept
        products = multiplied(asked, keys)
        if sinking is not None and pages.kept is not None:
            to_sinks = slots < pages.kept.sinks[seat] * each
            products = jnp.where(to_sinks, multiplied(sinking, keys), products)
        products = products if key_scales is None else products * key_scales.T[:, None, None]
        key, on_line = (slots, True) if tree is None else tree.keys(slots)
        logits, seen = scores(products, place, key)
        seen &= on_line
        if pages.kept is not None:
            seen &= pages.kept.seen(seat, place, key)
        top = jnp.max(logits, axis=-1, where=seen, initial=_NONE)
        weights = jnp.where(seen, jnp.exp(logits - top[..., None]), 0.0)
        by = weights if value_scales is None else weights * value_scales.T[:, None, None]
        out = jnp.einsum(
            "krwc,ckh->krwh", by.astype(values.dtype), values, preferred_element_type=jnp.float32
        )
        return top, jnp.sum(weights, axis=-1), out

    def part(i: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        number = begin + i
        columns = number[:, None] * at_once + jnp.arange(at_once, dtype=jnp.int32)
        places = jnp.clip(columns, 0, most - 1)
        chosen = jnp.take_along_axis(rows, places, axis=1)
        which = jnp.where(columns < most, jnp.take_along_axis(numbers, places, axis=1), most)
        held = {name: x[layer, chosen] for name, x in cache.items()}
        held = {name: x.reshape(x.shape[0], width, *x.shape[3:]) for name, x in held.items()}
        kept = jax.vmap(lambda held: read_kept(read, held, q.dtype))(held)
        slots = which[..., None] * each + jnp.arange(each, dtype=jnp.int32)
        slots = slots.reshape(-1, width)
        # What another left behind may be no number, and nothing times that is none either.
        keys, values, *scales = kept
        values = jnp.where((slots <= last[:, None])[..., None, None], values, 0)
        if scales[1] is not None:
            scales[1] = jnp.where((slots <= last[:, None])[..., None], scales[1], 0)
        top, total, out = state
        given = own, place, (keys, values, *scales), slots, trees
        if passed is None or sinking is None:
            of_part = jax.vmap(attended)(asked, None, *given)
        else:
            of_part = jax.lax.cond(
                jnp.any(passed.sinks_in(number * at_once)),
                lambda: jax.vmap(attended)(asked, sinking, *given),
                lambda: jax.vmap(attended)(asked, None, *given),
            )
        high = jnp.maximum(top, of_part[0])
        old, new = jnp.exp(top - high), jnp.exp(of_part[0] - high)
        return (
            high,
            total * old + of_part[1] * new,
            out * old[..., None] + of_part[2] * new[..., None],
        )

    groups, w = pages.groups.shape
    t, k, r, h = q.shape
    one = {
        name: jax.ShapeDtypeStruct((width, *x.shape[3:]), x.dtype)
        for name, x in without_scales(cache).items()
    }
    size = jax.eval_shape(read, one)[1].shape[-1]
    shape = (groups, k, r, w)
    # Of queries, else the compiler makes those of all layers at once, before the first.
    zero, _ = jax.lax.optimization_barrier((jnp.zeros(()), asked))
    begun = (zero + _NONE, shape), (zero, shape), (zero, (*shape, size))
    nothing = tuple(jnp.broadcast_to(*one) for one in begun)
    top, total, out = jax.lax.fori_loop(0, parts, part, nothing)
    if pages.ring:
        high = jax.lax.pmax(top, pages.ring)
        by = jnp.exp(top - high)
        total = jax.lax.psum(total * by, pages.ring)
        top, out = high, jax.lax.psum(out * by[..., None], pages.ring)
    if scores.sinks is not None:
        sinks = scores.sinks[None, :, :, None]
        high = jnp.maximum(top, sinks)
        total = total * jnp.exp(top - high) + jnp.exp(sinks - high)
        top, out = high, out * jnp.exp(top - high)[..., None]
    out = out / jnp.where(total == 0, 1.0, total)[..., None]
    flat = jnp.moveaxis(out, 3, 1).reshape(groups * w, k, r, size)
    to = jnp.where(there, pages.groups, t).reshape(-1)
    place = jnp.full((t,), groups * w, jnp.int32)
    place = place.at[to].set(jnp.arange(groups * w, dtype=jnp.int32), mode="drop")
    flat = flat.at[place].get(mode="fill", fill_value=0)
    return (flat, jnp.where(total == 0, jnp.inf, top + jnp.log(total))) if with_lse else flat


def scores_of(
    *,
    scale: float,
    window: tuple[int | None, int | None] | None,
    chunk: int | None,
    soft_cap: float | None,
    slopes: Array | None,
    sinks: Array | None,
    biases: Sequence[RelativeBias],
) -> Scores:
    """Of what attention is given; the window as of `Mask`."""
    return Scores(
        scale=scale,
        left=Mask(causal=True, window=window).left,
        chunk=chunk,
        soft_cap=soft_cap,
        slopes=slopes,
        sinks=sinks,
        biases=biases,
    )
