"""Seats that keep first pages and a window, against NumPy, position by position."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.pallas.attention import Kept, Pages, attend_cache, pages
from tests.pallas.attention.test_pages import (
    EACH,
    HEADS,
    KV_HEADS,
    LENGTHS,
    MOST,
    SEATS,
    TOKENS,
    H,
    calls,
    rows_of,
)

KEPT = [(1, 2), (0, 1), (2, 0)]
"""First pages and pages of a window of each seat; without a window all is kept."""


def turned(x, by):
    """Pairs half a head apart, turned by so many positions."""
    angles = np.asarray(by, np.float64)[..., None, None] * 0.7 ** np.arange(H // 2)
    first, second = np.split(np.asarray(x, np.float64), 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def truth(q, k, v, at, sinks, window):
    """What the token at this position gets, with the keys that it sees side by side."""
    own = at // EACH
    seen = [p for p in range(at + 1) if not window or p // EACH < sinks or p // EACH > own - window]
    gap = at + 1 - len(seen)
    beside = np.asarray([p if p // EACH < sinks else p - gap for p in seen])
    assert not window or beside.tolist() == list(range(len(seen)))
    beside = np.asarray(seen) if not window else beside
    query = turned(q[at : at + 1], [at - gap])[0].reshape(KV_HEADS, -1, H)
    keys = turned(k[seen], beside)
    logits = np.einsum("krh,ckh->krc", query, keys) / np.sqrt(H)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("krc,ckh->krh", weights, np.asarray(v[seen], np.float64)).reshape(HEADS, -1)


@pytest.mark.catches("first-pages-as-far-as-they-stood")
@pytest.mark.catches("window-of-a-page-less")
@pytest.mark.parametrize("at_once", [4, 12], ids=lambda n: f"{n} keys at once")
def test_what_is_kept_stands_side_by_side(at_once, monkeypatch):
    """In chunks of any length, pages taken in turn, beside seats that keep all."""
    monkeypatch.setattr(pages, "KEYS_AT_ONCE", at_once)
    rng = np.random.default_rng(2)
    draw = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        np.asarray(jax.random.normal(key, (SEATS, max(LENGTHS), n, H)))
        for key, n in zip(draw, (HEADS, KV_HEADS, KV_HEADS), strict=True)
    )
    ring = [w and w + -(-(6 - 1) // EACH) for _, w in KEPT]
    held = [s + r if r else MOST for (s, _), r in zip(KEPT, ring, strict=True)]
    table = np.zeros((SEATS, MOST), np.int32)
    order = rng.permutation(sum(held))
    for seat, count in enumerate(held):
        table[seat, :count] = order[sum(held[:seat]) :][:count]
    sinks, window = (jnp.asarray(x, jnp.int32) for x in zip(*KEPT, strict=True))
    kept = Kept(sinks=sinks, window=window, ring=jnp.asarray(ring, jnp.int32), page_tokens=EACH)
    state = rows_of(sum(held), EACH)
    state["v"] = jnp.full((*state["v"].shape[:-1], H), jnp.nan)
    step = jax.jit(functools.partial(attend_cache, layer=1))
    for tokens, groups in calls(rng):
        seat, position = (np.asarray(x, np.int32) for x in zip(*tokens, strict=True))
        at = (np.maximum(seat, 0), position)
        closer = np.asarray(kept.closer(jnp.asarray(seat), jnp.asarray(position)))
        found, state = step(
            jnp.asarray(turned(q[at], position), jnp.float32),
            {"k": jnp.asarray(turned(k[at], position), jnp.float32), "v": jnp.asarray(v[at])},
            state,
            seat=jnp.asarray(seat),
            position=jnp.asarray(position),
            slot=jnp.asarray(position),
            pages=Pages(table=jnp.asarray(table), groups=jnp.asarray(groups, jnp.int32), kept=kept),
            sink_q=jnp.asarray(turned(q[at], position - closer), jnp.float32),
        )
        for i in range(TOKENS):
            if seat[i] < 0:
                assert not np.asarray(found[i]).any()
                continue
            own = seat[i]
            expected = truth(q[own], k[own], v[own], int(position[i]), *KEPT[own])
            np.testing.assert_allclose(found[i], expected, rtol=1e-4, atol=1e-5)
