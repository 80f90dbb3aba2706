"""Attention to pages against attention to a cache whose rows are sequences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.pallas.attention import Pages, RelativeBias, attend_cache, cache, pages
from colossax.pallas.attention import paged as paged_door

LAYERS, SEATS, HEADS, KV_HEADS, H, HV = 2, 3, 4, 2, 8, 6
EACH, MOST, ALL, WIDTH, TOKENS = 4, 6, 16, 5, 12
LENGTHS = [9, 23, 5]


def bent(params, distance):
    return params.reshape(-1, *[1] * distance.ndim) * jnp.sqrt(jnp.abs(distance) + 1.0)


OPTIONS = {
    "plain": {},
    "window": {"window": (3, 0)},
    "window of a page": {"window": (4, 0)},
    "chunk": {"chunk": 5},
    "alibi": {"alibi_slopes": jnp.asarray([0.5, 0.2, 0.1, 0.05])},
    "capped": {"soft_cap": 1.0, "scale": 0.7},
    "sinks": {"sinks": jnp.asarray([0.5, -2.0, 1.0, 3.0])},
    "bias": {"biases": [RelativeBias(params=jnp.asarray([0.5, -0.2, 0.1, 0.3]), fn=bent)]},
}


def drawn():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (HEADS, H), (KV_HEADS, H), (KV_HEADS, HV)
    return tuple(
        jax.random.normal(r, (SEATS, max(LENGTHS), *x)) for r, x in zip(keys, shapes, strict=True)
    )


def rows_of(rows, slots):
    """What others left behind lies around."""
    shape = (LAYERS, rows, slots, KV_HEADS)
    return {"k": jnp.full((*shape, H), 7.0), "v": jnp.full((*shape, HV), 9.0)}


def calls(rng):
    """Tokens in any order of their sequences, and how they are grouped."""
    left = [0] * SEATS
    while any(done < length for done, length in zip(left, LENGTHS, strict=True)):
        tokens = []
        for seat, length in enumerate(LENGTHS):
            count = int(rng.integers(0, 7))
            count = min(count, TOKENS - len(tokens))
            tokens += [(seat, p) for p in range(left[seat], min(length, left[seat] + count))]
            left[seat] = min(length, left[seat] + count)
        tokens = [tokens[i] for i in rng.permutation(len(tokens))]
        groups = []
        for seat in range(SEATS):
            own = [i for i, (s, _) in enumerate(tokens) if s == seat]
            groups += [own[i : i + WIDTH] for i in range(0, len(own), WIDTH)]
        groups = [group + [-1] * (WIDTH - len(group)) for group in groups]
        groups += [[-1] * WIDTH] * (SEATS + TOKENS // WIDTH + 1 - len(groups))
        yield tokens + [(-1, 0)] * (TOKENS - len(tokens)), groups


def paged(rng):
    """Each sequence's pages, of all that there are, and a table with any number behind them."""
    order = rng.permutation(ALL)
    table, at = rng.integers(0, ALL, (SEATS, MOST)).astype(np.int32), 0
    for seat, length in enumerate(LENGTHS):
        count = -(-length // EACH)
        table[seat, :count] = order[at : at + count]
        at += count
    return jnp.asarray(table)


@pytest.mark.catches("pages-see-next")
@pytest.mark.catches("pages-begin-late")
@pytest.mark.catches("pages-not-rescaled")
@pytest.mark.parametrize("at_once", [4, 8, 24], ids=lambda n: f"{n} keys at once")
@pytest.mark.parametrize("option", OPTIONS)
def test_pages_hold_what_rows_would(option, at_once, monkeypatch):
    monkeypatch.setattr(pages, "KEYS_AT_ONCE", at_once)
    rng = np.random.default_rng(2)
    q, k, v = drawn()
    table = paged(rng)
    options = dict(OPTIONS[option])
    by_row = dict(options)
    step = jax.jit(functools.partial(attend_cache, **options))
    plain = jax.jit(functools.partial(attend_cache, **by_row))
    state, truth = rows_of(ALL, EACH), rows_of(SEATS, EACH * MOST)
    for tokens, groups in calls(rng):
        seat, position = (jnp.asarray(x, jnp.int32) for x in zip(*tokens, strict=True))
        at = (jnp.maximum(seat, 0), position)
        where = {"seat": seat, "position": position, "slot": position}
        new = {"k": k[at], "v": v[at]}
        one = Pages(table=table, groups=jnp.asarray(groups, jnp.int32))
        out, state = step(q[at], new, state, jnp.int32(1), **where, pages=one)
        expected, truth = plain(q[at], new, truth, jnp.int32(1), **where)
        assert not np.asarray(out)[np.asarray(seat) < 0].any()
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.catches("guesses-without-a-slot")
@pytest.mark.parametrize("implementation", ["auto", "xla"])
def test_a_guess_without_a_slot_shows_nothing_of_others(implementation, monkeypatch):
    """Its page is another's, who left what is no number there; the kernel's way too."""
    by = functools.partial(paged_door.attend_by_kernel, implementation=implementation)
    monkeypatch.setattr(cache, "attend_by_kernel", by)
    held = {n: x.at[:, 1].set(jnp.nan) for n, x in rows_of(2, EACH).items()}
    q, k, v = (x[0, 2:4] for x in drawn())
    where = {"seat": jnp.zeros(2, jnp.int32), "position": jnp.asarray([3, 4], jnp.int32)}
    table = jnp.asarray([[0, 1]], jnp.int32)
    step = jax.jit(functools.partial(attend_cache, q, {"k": k, "v": v}, held, 0, **where))
    found = []
    for groups in ([[0, 1]], [[0, -1]]):
        one = Pages(table=table, groups=jnp.asarray(groups, jnp.int32))
        found.append(step(slot=jnp.asarray([3, -1], jnp.int32), pages=one)[0])
    assert np.isfinite(found[0]).all() and not np.asarray(found[0])[1].any()
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)


@pytest.mark.catches("pages-written-outside")
def test_what_is_nobodys_is_left_alone():
    """Padding, tokens without a slot and those behind the last page write nowhere."""
    before = rows_of(ALL, EACH)
    table = jnp.zeros((SEATS, 2), jnp.int32)
    where = jnp.asarray([-1, 0, 0], jnp.int32), jnp.asarray([0, 1, 8], jnp.int32)
    new = {"k": jnp.ones((3, KV_HEADS, H)), "v": jnp.ones((3, KV_HEADS, HV))}
    _, after = attend_cache(
        jnp.ones((3, HEADS, H)),
        new,
        before,
        0,
        seat=where[0],
        position=where[1],
        slot=jnp.asarray([0, -1, 8], jnp.int32),
        pages=Pages(table=table, groups=jnp.asarray([[1, 2], [0, -1]], jnp.int32)),
    )
    for name, x in before.items():
        np.testing.assert_array_equal(after[name], x)
