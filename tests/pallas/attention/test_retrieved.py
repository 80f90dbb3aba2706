"""Guessed tokens and the pages that they see, each part by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from colossax.nn import alibi_slopes
from colossax.pallas.attention import Retrieved, attend_retrieved, mean_keys
from colossax.pallas.attention.codes import encoded
from colossax.pallas.attention.pages import scores_of
from colossax.pallas.attention.retrieved import found_pages

LAYERS, ROWS, EACH, KV, GROUP, SIZE = 2, 40, 4, 2, 3, 8
SEATS, PAGES, FOUND, GUESSES = 3, 12, 3, 5
VERIFIED = (45, 6, 23)
"""Of a long seat, one that has nothing to find, and one between."""

SCORES = {
    "plain": {},
    "alibi": {"slopes": alibi_slopes(KV * GROUP).reshape(KV, GROUP) * 3},
    "cap": {"soft_cap": 1.5},
    "window": {"window": (13, None)},
    "chunk": {"chunk": 16},
    "sinks": {"sinks": np.linspace(-1, 3, KV * GROUP, dtype=np.float32).reshape(KV, GROUP)},
}


def scores(name):
    given = {"window": None, "chunk": None, "soft_cap": None, "slopes": None, "sinks": None}
    asked = {n: jnp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in SCORES[name].items()}
    return scores_of(scale=0.4, biases=(), **{**given, **asked})


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def table():
    return np.random.default_rng(1).permutation(ROWS)[: SEATS * PAGES].reshape(SEATS, PAGES)


def logit(name, product, query, key):
    """Of one head, and whether it is seen; `product` of each of `[g]`."""
    asked, found = SCORES[name], product * 0.4
    if "soft_cap" in asked:
        found = 1.5 * np.tanh(found / 1.5)
    seen = key <= query
    if "window" in asked:
        seen &= query - key <= 13
    if "chunk" in asked:
        seen &= query // 16 == key // 16
    return found, seen


def pages_by_hand(name, q, means, verified, recent):
    """By kv head, best first: every page between the first and the last ones is looked at."""
    found = []
    for head in range(KV):
        known = []
        for page in range(1, (verified - 1) // EACH - recent + 1):
            last = page * EACH + EACH - 1
            value, seen = logit(name, q[head] @ means[page, head], verified, last)
            if "slopes" in SCORES[name]:
                value = value - SCORES[name]["slopes"][head] * (verified - last)
            if seen:
                known.append((-value.max(), page))
        found.append(([page for _, page in sorted(known)] + [-1] * FOUND)[:FOUND])
    return found


@pytest.mark.catches("pages-found-among-the-last")
@pytest.mark.catches("pages-found-for-one-query")
@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("verified", [0, 1, 6, 23, 45, 48])
def test_the_pages_that_are_found_are_those_of_the_highest_logits(name, verified):
    for seed in range(8):
        q, means = normal(seed, KV, GROUP, SIZE), normal(seed + 50, PAGES, KV, SIZE)
        sizes = {"each": EACH, "recent": 2, "count": FOUND}
        found = found_pages(
            *(jnp.asarray(q), jnp.asarray(means), jnp.int32(verified)), **sizes, scores=scores(name)
        )
        assert found.tolist() == pages_by_hand(name, q, means, verified, 2)


def test_more_pages_than_there_are_find_them_all():
    q, means = normal(0, KV, GROUP, SIZE), normal(1, PAGES, KV, SIZE)
    given = jnp.asarray(q), jnp.asarray(means), jnp.int32(48)
    found = found_pages(*given, each=EACH, recent=1, count=20, scores=scores("plain"))
    assert found.shape == (KV, 20)
    assert [sorted(x) for x in found.tolist()] == [[-1] * 10 + list(range(1, 11))] * KV


@pytest.mark.catches("means-of-codes")
@pytest.mark.parametrize("codes", [None, "int8"])
def test_mean_keys_are_renewed_where_they_are_asked_for(codes):
    keys = normal(0, LAYERS, ROWS, EACH, KV, SIZE)
    cache = {"k": jnp.asarray(keys)}
    if codes:
        cache["k"], cache["k_scale"] = encoded(cache["k"], codes, jnp.float32)
    before = normal(1, LAYERS, ROWS, KV, SIZE)
    rows = [3, 7, 3, ROWS + 5, 2**31 - 1]
    want = before.copy()
    want[:, [3, 7]] = keys[:, [3, 7]].mean(axis=2)
    found = mean_keys(jnp.asarray(before), cache, jnp.asarray(rows, jnp.int32))
    np.testing.assert_allclose(found, want, atol=1e-2 if codes else 1e-6)


def by_hand(name, q, keys, values, seat, verified, place, guessed, found, recent):
    """One token of one seat: the dense softmax over the slots that it sees."""
    out = np.zeros((KV, GROUP, SIZE))
    for head in range(KV):
        last = (verified - 1) // EACH
        pages = {0, *range(max(0, last - recent + 1), last + 1), *found[head]} - {-1}
        slots = [p * EACH + i for p in sorted(pages) for i in range(EACH)]
        seen = [
            (s, keys, values, table()[seat, s // EACH], s % EACH) for s in slots if s < verified
        ]
        rows = [(s, k[row, at, head], v[row, at, head]) for s, k, v, row, at in seen]
        rows += [(verified + i, *(x[seat, i, head] for x in guessed)) for i in range(place + 1)]
        for g in range(GROUP):
            weights, total = [], 0.0
            for at, key, value in rows:
                one, there = logit(name, np.array([q[head, g] @ key]), verified + place, at)
                if "slopes" in SCORES[name]:
                    one = one - SCORES[name]["slopes"][head, g] * (verified + place - at)
                if there:
                    weights.append((np.exp(float(one[0])), value))
            total = sum(w for w, _ in weights)
            if "sinks" in SCORES[name]:
                total += np.exp(SCORES[name]["sinks"][head, g])
            out[head, g] = sum(w * value for w, value in weights) / total
    return out


@pytest.mark.catches("guesses-see-ahead")
@pytest.mark.catches("pages-of-another-head")
@pytest.mark.catches("unverified-slots-are-seen")
@pytest.mark.parametrize("codes", [None, "int8"])
@pytest.mark.parametrize("name", SCORES)
def test_tokens_see_their_pages_and_the_guesses_before_them(name, codes):
    """Two calls: one of two tokens that finds pages, one behind them that keeps these."""
    if codes and name not in ("plain", "alibi"):
        return
    layer, recent = 1, 1
    keys, values = (normal(seed, LAYERS, ROWS, EACH, KV, SIZE) for seed in (0, 1))
    cache = {"k": jnp.asarray(keys), "v": jnp.asarray(values)}
    if codes:
        for kind in ("k", "v"):
            cache[kind], cache[f"{kind}_scale"] = encoded(cache[kind], codes, jnp.float32)
    means = keys.mean(axis=2)
    # What is behind the last position of a seat is nobody's, and no number.
    for seat, count in enumerate(VERIFIED):
        for slot in range(count, PAGES * EACH):
            row, at = table()[seat, slot // EACH], slot % EACH
            for kind in ("k_scale", "v_scale") if codes else ("k", "v"):
                cache[kind] = cache[kind].at[:, row, at].set(jnp.nan)
    cache["mean"] = jnp.asarray(means)
    empty = jnp.full((LAYERS, SEATS, GUESSES, KV, SIZE), 9.0)
    cache |= {"draft_k": empty, "draft_v": empty}
    cache["found"] = jnp.full((LAYERS, SEATS, KV, FOUND), 7, jnp.int32)
    guessed = tuple(normal(seed, SEATS, 4, KV, SIZE) for seed in (2, 3))
    q = normal(4, SEATS, 4, KV, GROUP, SIZE)
    found = [
        pages_by_hand(name, q[seat, 0], means[layer, table()[seat]], count, recent)
        for seat, count in enumerate(VERIFIED)
    ]
    for places, renews in (((0, 1), True), ((2, 3), False)):
        there = np.tile(np.asarray(places), (SEATS, 1))
        there[1, 1] = -1
        new = {n: x[:, places].reshape(-1, KV, SIZE) for n, x in zip("kv", guessed, strict=True)}
        out, cache = attend_retrieved(
            jnp.asarray(q[:, places].reshape(-1, KV * GROUP, SIZE)),
            {n: jnp.asarray(x) for n, x in new.items()},
            cache,
            layer,
            retrieved=Retrieved(
                table=jnp.asarray(table(), jnp.int32),
                verified=jnp.asarray(VERIFIED, jnp.int32),
                place=jnp.asarray(there, jnp.int32),
                renews=jnp.asarray(renews),
                recent=recent,
            ),
            scores=scores(name),
        )
        assert cache["found"][layer].tolist() == found
        out = np.asarray(out).reshape(SEATS, 2, KV, GROUP, SIZE)
        for seat, count in enumerate(VERIFIED):
            for i, place in enumerate(places):
                if there[seat, i] < 0:
                    assert not out[seat, i].any()
                    continue
                if seat == 1 and place > 1:
                    continue  # the guess before it was none
                given = keys[layer], values[layer], seat, count, place, guessed, found[seat]
                want = by_hand(name, q[seat, place], *given, recent)
                np.testing.assert_allclose(out[seat, i], want, atol=4e-2 if codes else 1e-5)
