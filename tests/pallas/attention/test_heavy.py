"""Seats that keep heavy hitters and a window, against NumPy, position by position."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.pallas.attention import Heavy, Pages, attend_cache, counted, heavy, pages
from tests.pallas.attention.test_pages import EACH, HEADS, HV, KV_HEADS, SEATS, H

KEPT = [(2, 1), (0, 0), (1, 2)]
"""Pages of heavy hitters and of a window of each seat; without any all is kept."""

LENGTHS, MOST, TOKENS = [39, 14, 30], 5, 12


def truth(q, k, v, heavy, window, each=EACH, scale=None):
    """What each token gets, `[s, n, hv]`, and the positions that each kv head has kept at the end.

    Args:
        q, k, v: `[s, n or k, h]` of one sequence.
        heavy, window: In pages.
        each: Tokens of a page.
        scale: Of products; default as attention has it.
    """
    heads = range(k.shape[1])
    queries = np.asarray(q, np.float64).reshape(len(q), k.shape[1], -1, q.shape[-1])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    kept, mass, out = [[] for _ in heads], [{} for _ in heads], []
    for p in range(len(q)):
        page, told = p // each, []
        for i in heads:
            if p % each == 0 and heavy and len(kept[i]) == (heavy + window) * each:
                old = [x for x in kept[i] if x // each <= page - window]
                gone = sorted(old, key=lambda x: (mass[i][x], x))[:each]
                kept[i] = [x for x in kept[i] if x not in gone]
            kept[i].append(p)
            mass[i][p] = 0.0
            logits = queries[p, i] @ np.asarray(k, np.float64)[kept[i], i].T * scale
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            for x, more in zip(kept[i], weights.sum(0), strict=True):
                mass[i][x] += more
            told.append(weights @ np.asarray(v, np.float64)[kept[i], i])
        out.append(np.concatenate(told))
    return np.stack(out), kept


def calls(rng, each=EACH):
    """Tokens of a step, those of a seat side by side in any order of seats, and their groups."""
    left = [0] * SEATS
    while any(done < length for done, length in zip(left, LENGTHS, strict=True)):
        tokens, groups = [], []
        for seat in rng.permutation(SEATS):
            count = min(int(rng.choice([0, 1, 2, 3, 7, 10])), TOKENS - len(tokens))
            own = range(left[seat], min(LENGTHS[seat], left[seat] + count))
            at = range(len(tokens), len(tokens) + len(own))
            groups += [list(at[i : i + each]) for i in range(0, len(at), each)]
            tokens += [(seat, p) for p in own]
            left[seat] += len(own)
        groups = [group + [-1] * (each - len(group)) for group in groups]
        groups += [[-1] * each] * (SEATS + TOKENS // each - len(groups))
        yield tokens + [(-1, 0)] * (TOKENS - len(tokens)), groups


def drawn(length, h=H, hv=HV):
    """Queries that look at a few keys most, at any place and others for each head."""
    draw = jax.random.split(jax.random.key(3), 4)
    shapes = (HEADS, h), (KV_HEADS, h), (KV_HEADS, hv)
    q, k, v = (
        np.asarray(jax.random.normal(key, (SEATS, length, *shape)))
        for key, shape in zip(draw[:3], shapes, strict=True)
    )
    liked = np.asarray(jax.random.normal(draw[3], (SEATS, length, KV_HEADS))) ** 3
    k = k.copy()
    k[..., 0] += 4 * liked
    q = np.concatenate([1 + 0 * q[..., :1], q[..., 1:]], axis=-1)
    return q, k, v


def served(cuts, q, k, v, each=EACH, dtype=jnp.float32):
    """Outputs of all tokens, positions that each seat's slots hold at the end, and masses."""
    rng = np.random.default_rng(1)
    held = [(a + b) or -(-n // each) for (a, b), n in zip(KEPT, LENGTHS, strict=True)]
    table = rng.integers(0, sum(held), (SEATS, MOST)).astype(np.int32)
    order = rng.permutation(sum(held))
    for seat, count in enumerate(held):
        table[seat, :count] = order[sum(held[:seat]) :][:count]
    heavy, window = (jnp.asarray(x, jnp.int32) for x in zip(*KEPT, strict=True))
    beside = 2, sum(held), each, KV_HEADS
    filled = {"k": (k, 7.0), "v": (v, jnp.nan)}
    state = {n: jnp.full((*beside, x.shape[-1]), y, dtype) for n, (x, y) in filled.items()}
    state |= {"k_mass": jnp.full(beside, jnp.nan), "k_place": jnp.full(beside, 3, jnp.int32)}
    step = jax.jit(functools.partial(attend_cache, layer=1), donate_argnums=2)
    out = np.zeros((SEATS, max(LENGTHS), HEADS, v.shape[-1]))
    for tokens, groups in cuts:
        seat, position = (jnp.asarray(x, jnp.int32) for x in zip(*tokens, strict=True))
        at = (np.maximum(seat, 0), position)
        groups = jnp.asarray(groups, jnp.int32)
        found, state = step(
            jnp.asarray(q[at], dtype),
            {"k": jnp.asarray(k[at], dtype), "v": jnp.asarray(v[at], dtype)},
            state,
            seat=seat,
            position=position,
            slot=position,
            pages=Pages(
                table=jnp.asarray(table),
                groups=groups,
                heavy=Heavy.of(heavy, window, seat, position, each),
            ),
        )
        there = np.asarray(seat) >= 0
        assert not np.asarray(found)[~there].any()
        out[at[0][there], np.asarray(position)[there]] = np.asarray(found)[there]
    rows = [table[seat, :count] for seat, count in enumerate(held)]
    places, masses = (
        [np.asarray(state[name])[1, row].reshape(-1, KV_HEADS) for row in rows]
        for name in ("k_place", "k_mass")
    )
    return out, places, masses


@pytest.mark.catches("heavy-of-one-head")
@pytest.mark.catches("heavy-window-let-go")
@pytest.mark.catches("heavy-mass-of-the-last")
@pytest.mark.catches("heavy-moved-on-top")
@pytest.mark.parametrize("at_once", [4, 12], ids=lambda n: f"{n} keys at once")
def test_each_head_keeps_what_it_looked_at(at_once, monkeypatch):
    """In chunks of any length, beside a seat that keeps all."""
    monkeypatch.setattr(pages, "KEYS_AT_ONCE", at_once)
    for room in (heavy, counted):
        monkeypatch.setattr(room, "KEYS_AT_ONCE", at_once)
    q, k, v = drawn(max(LENGTHS))
    out, places, _ = served(calls(np.random.default_rng(2)), q, k, v)
    for seat, (length, kept) in enumerate(zip(LENGTHS, KEPT, strict=True)):
        one = (x[seat, :length] for x in (q, k, v))
        expected, positions = truth(*one, *kept)
        np.testing.assert_allclose(out[seat, :length], expected, rtol=1e-4, atol=1e-5)
        if kept == (0, 0):
            continue
        assert positions[0] != positions[1]
        for head in range(KV_HEADS):
            current = (length - 1) // EACH * EACH
            found = set(places[seat][:, head].tolist())
            # Of the last page, places that no token of this one has taken yet hold the one before.
            stale = {x for x in found if current - EACH <= x < current} - set(positions[head])
            assert found - stale == set(positions[head])


@pytest.mark.catches("heavy-cut-by-calls")
def test_cuts_change_no_bit():
    """One token a call, or as many as there is room for."""
    q, k, v = drawn(max(LENGTHS))

    def one_by_one():
        for p in range(max(LENGTHS)):
            tokens = [(s, p) for s in range(SEATS) if p < LENGTHS[s]]
            groups = [[i] + [-1] * (EACH - 1) for i in range(len(tokens))]
            groups += [[-1] * EACH] * (6 - len(groups))
            yield tokens + [(-1, 0)] * (TOKENS - len(tokens)), groups

    many = served(calls(np.random.default_rng(5)), q, k, v)
    single = served(one_by_one(), q, k, v)
    for a, b in zip(jax.tree.leaves(many), jax.tree.leaves(single), strict=True):
        np.testing.assert_array_equal(a, b)


def test_steps_of_single_tokens():
    """Groups of one token, as of a step that only decodes."""
    q, k, v = drawn(max(LENGTHS))

    def one_by_one():
        for p in range(max(LENGTHS)):
            tokens = [(s, p) for s in range(SEATS) if p < LENGTHS[s]]
            groups = [[i] for i in range(len(tokens))] + [[-1]] * (SEATS - len(tokens))
            yield tokens + [(-1, 0)] * (SEATS - len(tokens)), groups

    out, *_ = served(one_by_one(), q, k, v)
    for seat, (length, kept) in enumerate(zip(LENGTHS, KEPT, strict=True)):
        expected, _ = truth(*(x[seat, :length] for x in (q, k, v)), *kept)
        np.testing.assert_allclose(out[seat, :length], expected, rtol=1e-4, atol=1e-5)
