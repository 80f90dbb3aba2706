"""Attention of flat tokens to a cache, in its plain form."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from colossax.errors import InputError

from .codes import as_kept, without_scales
from .heavy import attend_heavy
from .kept import HEAVY
from .paged import attend_by_kernel
from .pages import Pages, attend_pages, scores_of
from .relative import RelativeBias
from .seats import attend_seats

ReadSlots = Callable[[dict[str, Array]], tuple[Array, Array]]
"""Keys `[slots, k, h]` and values `[slots, k, hv]` from what a seat's slots hold, by name.

It picks and reshapes, and computes nothing: of codes it is given the scales too, `[slots, ..., 1]`.
"""


def keys_and_values(held: dict[str, Array]) -> tuple[Array, Array]:
    """Of a cache that keeps them as they are: its `k` and its `v`."""
    return held["k"], held["v"]


def attend_cache(
    q: Float[Array, "t n h"],
    new: dict[str, Array] | None,
    cache: dict[str, Array],
    layer: int | Int[Array, ""],
    *,
    seat: Int[Array, " t"],
    position: Int[Array, " t"],
    slot: Int[Array, " t"],
    window: tuple[int | None, int | None] | None = None,
    chunk: int | None = None,
    alibi_slopes: Float[Array, " n"] | None = None,
    sinks: Float[Array, " n"] | None = None,
    biases: Sequence[RelativeBias] = (),
    scale: float | None = None,
    soft_cap: float | None = None,
    read: ReadSlots = keys_and_values,
    pages: Pages | None = None,
    sink_q: Float[Array, "t n h"] | None = None,
) -> tuple[Float[Array, "t n hv"], dict[str, Array]]:
    """Write what is kept of flat tokens into the cache, then attend within each one's seat.

    A token sees the slots of its own seat that hold positions up to its own, tokens of this call
    included; `slot` equals `position`, but in trees (`Branches`), and positions below a token's
    must have been written.
    Without a window position p is in slot p, and a token outside of the cache is not written. With
    one, slots are taken in turn: position p is in slot p mod slots, and `left + c` of them do for
    calls with at most c tokens of a seat; with chunks likewise, `chunk - 1 + c` of them. Tokens of
    a seat's last call may be taken back: the next begins where the first of them was.

    Args:
        q: Queries of tokens of any sequences, in any order.
        new: What is kept of them, by name, `[t, ...]`: keys `k` and values `v`, or what `read`
            makes keys and values from. None: nothing is written, and a token sees the slots up to
            its position of what is there (a source that was read before).
        cache: Arrays of the same names, `[layers, seats, slots, ...]`, whole: a slice of a layer
            would be copied. Donated, or carried by a loop, it is written in place. In eight bits,
            int8 or float8_e4m3fn, each has beside it `<name>_scale`, without the last dim: codes
            and scales are made when tokens are written, and decoded where they are read.
        layer: Which layer this is; may be traced.
        seat: Row of the cache of each token; a negative one is padding: nothing is written, the
            output is 0.
        position: Position of each token in its sequence.
        slot: Where in the seat it goes; negative: nothing is written.
        window: `(left, right)` as of `Mask`: a token sees `left` keys strictly before it, None for
            all; none after it, whatever `right` is.
        chunk: A token sees keys of its own chunk of so many positions; None: of all.
        alibi_slopes: Penalty per head and unit of distance.
        sinks: One more logit per head, in the denominator only.
        biases: Of the distance of a token to those it sees.
        scale: Default `1 / sqrt(h)`.
        soft_cap: Bound of the logits.
        read: Keys and values from what a seat's slots hold.
        pages: The rows of the cache are pages, which these say whose they are, in place of seats.
            Then position p is in the slot p mod slots of the page p // slots of its seat, and a
            token outside of them is not written; only `Pages.rings` are taken in turn. A token of
            `new` without a slot sees nothing, and its output is 0.
        sink_q: With `Pages.kept`, see `attend_pages`.

    Returns:
        Output in q's dtype and the cache with the tokens in it.

    Raises:
        InputError: `new` and `cache` have other names, or biases meet a cache whose slots are taken
            in turn.

    Cost: that of `attend_seats`; with pages that of `attend_pages`.
    """
    plain = without_scales(cache)
    if new is not None and new.keys() != plain.keys():
        raise InputError(
            f"attend_cache: the cache holds {', '.join(sorted(plain))}, and the tokens bring"
            f" {', '.join(sorted(new))}; give each array of the one for the other"
        )
    t, n, h = q.shape
    one = {name: jax.ShapeDtypeStruct(x.shape[2:], x.dtype) for name, x in plain.items()}
    kv_heads = jax.eval_shape(read, one)[0].shape[1]
    by_head = [None if x is None else x.reshape(kv_heads, -1) for x in (alibi_slopes, sinks)]
    scores = scores_of(
        scale=h**-0.5 if scale is None else scale,
        window=window,
        chunk=chunk,
        soft_cap=soft_cap,
        slopes=by_head[0],
        sinks=None if by_head[1] is None else by_head[1].astype(jnp.float32),
        biases=biases,
    )
    left = scores.reach
    seats, slots = next(iter(plain.values())).shape[1:3]
    if pages is not None and new is not None:
        # Where it would lie may be what another left, and a group's other tokens multiply it by 0.
        seat = jnp.where(slot < 0, -1, seat)
    every, beside = seat, {name: cache[name] for name in HEAVY if name in cache}
    cache = {name: x for name, x in cache.items() if name not in beside}
    if pages is not None and pages.heavy is not None:
        seat = jnp.where(pages.heavy.has(seat), -1, seat)
    if biases and left is not None and pages is None:
        raise InputError(
            "attend_cache: biases by distance are not computed where a window or chunks take slots"
            " in turn; give neither window nor chunk"
        )
    # A negative index would count from the end: move it out of range, where it is dropped.
    if pages is None:
        row = jnp.where(seat < 0, seats, seat)
        column = jnp.where(slot < 0, slots, slot if left is None else slot % slots)
    else:
        row, column = pages.row_and_column(seat, slot, next(iter(plain.values())).shape, left)
    kept = {} if new is None else as_kept(new, cache)
    if new is not None:
        cache = {
            name: x.at[layer, row, column].set(kept[name], mode="drop") for name, x in cache.items()
        }
    grouped = q.reshape(t, kv_heads, -1, h)
    where: dict[str, Any] = {"seat": seat, "position": position, "scores": scores, "read": read}
    if pages is None:
        out = attend_seats(grouped, cache, layer, **where)
        return out.reshape(t, n, -1).astype(q.dtype), cache
    sinking = None if sink_q is None else sink_q.reshape(grouped.shape)
    plainly = read is keys_and_values
    out = attend_by_kernel(grouped, cache, layer, pages, **where, plain=plainly)
    if out is None:
        out = attend_pages(grouped, cache, layer, pages, **where, slot=slot, sink_q=sinking)
    if pages.heavy is not None:
        where |= {"seat": every, "plain": plainly}
        out, cache = attend_heavy(grouped, kept, cache | beside, layer, pages, out, **where)
    return out.reshape(t, n, -1).astype(q.dtype), cache
