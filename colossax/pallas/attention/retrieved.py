"""Attention of guessed tokens to a few pages of their seats, found by their mean keys."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .codes import SCALE
from .pages import Scores

MEAN, DRAFT, FOUND = "mean", "draft_", "found"
"""Names of what is carried beside a cache: mean keys of its pages; with `k` or `v`, what is kept of
tokens that are guessed; and numbers of the pages that were found."""

GATHERED_BYTES = 2**26
"""Keys and values gathered at once; more seats go chunk by chunk."""

_NONE = -1e30
"""What stands for the largest of no logits."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Retrieved:
    """What guessed tokens see: the first page, pages that are found, the last ones, and each other.

    A call has the same number w of tokens of each seat, in order.

    Attributes:
        table: `[r, p]` int32: rows of the cache that each seat holds, in order of position.
        verified: `[r]` int32: positions that the model has seen; of its pages no others are read.
        place: `[r, w]` int32: where each token stands behind those, from 0; negative: it is none.
        renews: Whether pages are found anew, by the query of each seat's first token of the call.
        recent: Last pages that are seen whatever is found.
    """

    table: Int[Array, "r p"]
    verified: Int[Array, " r"]
    place: Int[Array, "r w"]
    renews: Bool[Array, ""]
    recent: int = dataclasses.field(metadata={"static": True})


def attend_retrieved(
    q: Float[Array, "t n h"],
    new: dict[str, Array],
    cache: dict[str, Array],
    layer: int | Int[Array, ""],
    *,
    retrieved: Retrieved,
    scores: Scores,
) -> tuple[Float[Array, "t n hv"], dict[str, Array]]:
    """Keep guessed tokens apart from the cache, and attend to them and to a part of their pages.

    Softmax over the keys of page 0, of the pages that were found for the kv head, of the last
    `recent` ones, and of the guessed tokens up to each. The cache is only read.

    Args:
        q: Queries, `t = r w`, by seat.
        new: `k` and `v` of the tokens, `[t, k, h]`.
        cache: `k` and `v` in pages, `[layers, pages, slots, k, h]`, with scales where they are
            codes; `mean`, `[layers, pages, k, h]`, see `mean_keys`; `draft_k` and `draft_v`,
            `[layers, r, d, k, h]`, of guessed tokens by place; `found`, `[layers, r, k, c]` int32,
            pages of each seat by number, negative for none.
        layer: Which; may be traced.
        retrieved: See there.
        scores: How products become logits.

    Returns:
        Output in q's dtype, and `cache` with the tokens, and with pages if they were renewed.

    Cost: 4 t n h FLOPs and reads of keys and values for each slot of `1 + c + recent` pages, for
    each seat and kv head; where pages are renewed 2 r p n h FLOPs and reads of `r p k h` means,
    `2 * slots` times fewer than keys and values of all pages.
    """
    (seats, w), kv_heads = retrieved.place.shape, cache["k"].shape[3]
    drafted = {name: _with_new(cache[DRAFT + name], x, layer, retrieved) for name, x in new.items()}
    grouped = q.reshape(seats, w, kv_heads, -1, q.shape[-1])

    def of_seat(given: tuple[Any, ...]) -> tuple[Array, Array]:
        q, table, verified, place, before, keys, values = given
        found = jax.lax.cond(
            retrieved.renews,
            lambda: found_pages(
                q[0],
                cache[MEAN][layer, table],
                verified,
                each=cache["k"].shape[2],
                recent=retrieved.recent,
                count=before.shape[-1],
                scores=scores,
            ),
            lambda: before,
        )
        number = _numbers(found, verified, cache["k"].shape[2], retrieved.recent)
        held = _gathered(cache, layer, table, number)
        return _attended(q, held, (keys, values), number, verified, place, scores), found

    of_seats = (
        *(grouped, retrieved.table, retrieved.verified, retrieved.place),
        *(cache[FOUND][layer], drafted["k"][layer], drafted["v"][layer]),
    )
    pages = 1 + cache[FOUND].shape[-1] + retrieved.recent
    vectors = sum(cache[name][0, 0].size * cache[name].dtype.itemsize for name in ("k", "v"))
    at_once = max(1, min(seats, GATHERED_BYTES // (pages * vectors)))
    out, found = jax.lax.map(of_seat, of_seats, batch_size=at_once)
    cache = {**cache, **{DRAFT + name: x for name, x in drafted.items()}}
    cache[FOUND] = cache[FOUND].at[layer].set(found)
    return out.reshape(*q.shape[:2], -1).astype(q.dtype), cache


def found_pages(
    q: Float[Array, "k g h"],
    means: Float[Array, "p k h"],
    verified: Int[Array, ""],
    *,
    each: int,
    recent: int,
    count: int,
    scores: Scores,
) -> Int[Array, "k c"]:
    """Pages of one seat that its last token asks for, by number; -1 where there are no more.

    For each kv head those with the highest logit of any of its queries with the mean key, which
    stands at the page's last position. Neither page 0 nor one of the last is among them, nor one
    that the token does not see.

    Args:
        q: Of the token at position `verified`.
        means: Of the seat's pages in order.
        verified: Positions that the model has seen.
        each: Tokens of a page.
        recent: Last pages that are not among them.
        count: How many to find.
        scores: How products become logits.
    """
    number = jnp.arange(means.shape[0], dtype=jnp.int32)
    last = number * each + each - 1
    products = jnp.einsum(
        "kgh,pkh->kgp", q.astype(means.dtype), means, preferred_element_type=jnp.float32
    )
    logits, seen = scores(products[:, :, None], verified[None], last)
    there = seen[0] & (number > 0) & (number <= (verified - 1) // each - recent)
    best = jnp.where(there, jnp.max(logits[:, :, 0], axis=1), -jnp.inf)
    top, found = jax.lax.top_k(best, min(count, means.shape[0]))
    found = jnp.where(top > -jnp.inf, found.astype(jnp.int32), -1)
    return jnp.pad(found, ((0, 0), (0, count - found.shape[1])), constant_values=-1)


def mean_keys(
    means: Float[Array, "l p k h"],
    cache: dict[str, Array],
    rows: Int[Array, " m"],
) -> Float[Array, "l p k h"]:
    """Mean keys of pages, with those of some rows made anew.

    Args:
        means: Of all pages; given up.
        cache: `k`, and `k_scale` where those are codes, in pages.
        rows: Which, in any order and as often as it likes; out of range: none.

    Cost: reads the keys of those pages in all layers; holds those of one.
    """

    def of_layer(layer: Array, means: Array) -> Array:
        keys = cache["k"].at[layer, rows].get(mode="clip").astype(jnp.float32)
        if "k" + SCALE in cache:
            scales = cache["k" + SCALE].at[layer, rows].get(mode="clip")
            keys = keys * scales.astype(jnp.float32)[..., None]
        mean = jnp.mean(keys, axis=1).astype(means.dtype)
        return means.at[layer, rows].set(mean, mode="drop")

    return jax.lax.fori_loop(0, means.shape[0], of_layer, means)


def _with_new(
    drafted: Array, new: Array, layer: int | Int[Array, ""], retrieved: Retrieved
) -> Array:
    """What is kept of guessed tokens, with those of this call."""
    place = retrieved.place
    seat = jnp.broadcast_to(jnp.arange(len(place), dtype=jnp.int32)[:, None], place.shape)
    column = jnp.where(place < 0, drafted.shape[2], place)
    new = new.reshape(*place.shape, *new.shape[1:]).astype(drafted.dtype)
    return drafted.at[layer, seat, column].set(new, mode="drop")


def _numbers(found: Array, verified: Array, each: int, recent: int) -> Int[Array, "k c"]:
    """Pages of one seat that are read, for each kv head; negative: none."""
    last = (verified - 1) // each - jnp.arange(recent, dtype=jnp.int32)
    last = jnp.where(last > 0, last, -1)
    always = jnp.concatenate([jnp.zeros(1, jnp.int32), last])
    always = jnp.broadcast_to(always, (found.shape[0], recent + 1))
    return jnp.concatenate([always, found], axis=1)


def _gathered(cache: dict[str, Array], layer: Any, table: Array, number: Array) -> dict[str, Array]:
    """Of one seat: what pages hold, other ones for each kv head, `[k, c, ...]`."""
    each, kv_heads = cache["k"].shape[2:4]
    rows = table[jnp.clip(number, 0, len(table) - 1)][:, :, None]
    slot = jnp.arange(each, dtype=jnp.int32)[None, None]
    head = jnp.arange(kv_heads, dtype=jnp.int32)[:, None, None]
    names = [n for n in cache if n.removesuffix(SCALE) in ("k", "v")]
    held = {name: cache[name][layer, rows, slot, head] for name in names}
    return {name: x.reshape(kv_heads, -1, *x.shape[3:]) for name, x in held.items()}


def _attended(
    q: Float[Array, "w k g h"],
    held: dict[str, Array],
    drafted: tuple[Array, Array],
    number: Int[Array, "k c"],
    verified: Array,
    place: Int[Array, " w"],
    scores: Scores,
) -> Float[Array, "w k g hv"]:
    """Of one seat: softmax over what its pages hold before `verified`, and over its guesses."""
    kv_heads, count = number.shape
    each, guesses = held["k"].shape[1] // count, drafted[0].shape[0]
    slot = (number[..., None] * each + jnp.arange(each, dtype=jnp.int32)).reshape(kv_heads, -1)
    there = (slot >= 0) & (slot < verified)
    behind = jnp.broadcast_to(jnp.arange(guesses, dtype=jnp.int32), (kv_heads, guesses))
    slot = jnp.concatenate([slot, verified + behind], axis=1)
    there = jnp.concatenate([there, behind <= jnp.max(place)], axis=1)
    parts = {}
    for name, own in zip(("k", "v"), drafted, strict=True):
        own = jnp.moveaxis(own, 1, 0)
        scale = held.get(name + SCALE)
        x = held[name] if scale is None else held[name].astype(q.dtype)
        x = jnp.concatenate([x, own.astype(x.dtype)], axis=1)
        # What another left behind may be no number, and nothing times that is none either.
        x = jnp.where(there[..., None], x, 0)
        if scale is not None:
            scale = jnp.pad(scale.astype(jnp.float32), ((0, 0), (0, guesses)), constant_values=1)
            scale = jnp.where(there, scale, 0)
        parts[name] = x, scale

    def of_head(
        q: Array, k: Any, v: Any, slot: Array, there: Array, slopes: Any, sinks: Any
    ) -> Any:
        (keys, of_keys), (values, of_values) = k, v
        products = jnp.einsum(
            "wgh,ch->gwc", q.astype(keys.dtype), keys, preferred_element_type=jnp.float32
        )
        products = products if of_keys is None else products * of_keys
        own = dataclasses.replace(scores, slopes=None if slopes is None else slopes[None])
        logits, seen = own(products[None], verified + place, slot)
        logits, seen = logits[0], seen & there & (place >= 0)[:, None]
        top = jnp.max(logits, axis=-1, where=seen, initial=_NONE, keepdims=True)
        top = top if sinks is None else jnp.maximum(top, sinks[:, None, None])
        weights = jnp.where(seen, jnp.exp(logits - top), 0.0)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        total = total if sinks is None else total + jnp.exp(sinks[:, None, None] - top)
        weights = weights / jnp.where(total == 0, 1.0, total)
        weights = weights if of_values is None else weights * of_values
        return jnp.einsum(
            "gwc,ch->wgh", weights.astype(values.dtype), values, preferred_element_type=jnp.float32
        )

    of_heads = jax.vmap(of_head, in_axes=(1, 0, 0, 0, 0, 0, 0), out_axes=1)
    return of_heads(q, parts["k"], parts["v"], slot, there, scores.slopes, scores.sinks)
