"""Tiles visited are those that have a visible pair, of a random mask counted pair by pair."""

import jax.numpy as jnp
import numpy as np
import pytest

from colossax.pallas.attention import Mask, dense, row_ranges
from colossax.pallas.attention.tiles import visits_of_keys, visits_of_queries

CASES, AT_ONCE = 200, 20


def random_mask(rng: np.random.Generator, s: int, t: int) -> Mask:
    """Causal or not, windows, packed rows with padding, positions given or not."""
    causal = bool(rng.integers(2))
    window = None
    if rng.random() < 0.4:
        window = (int(rng.integers(0, s)), None if causal else int(rng.integers(0, t)))
    fields = {}
    if rng.random() < 0.5:
        for name, length in (("q", s), ("kv", t)):
            segments = np.sort(rng.integers(0, 4, length))
            segments[length - int(rng.integers(0, length // 3)) :] = -1
            fields[f"{name}_segments"] = jnp.asarray(segments[None], jnp.int32)
    elif rng.random() < 0.5:
        # Chunks of a longer row, as in a ring.
        for name, length in (("q", s), ("kv", t)):
            found = np.sort(rng.choice(4 * max(s, t), length, replace=False))
            fields[f"{name}_positions"] = jnp.asarray(found[None], jnp.int32)
    return Mask(causal=causal, window=window, **fields)


@pytest.mark.catches("visits-inner-tile")
@pytest.mark.parametrize("first", range(0, CASES, AT_ONCE))
def test_visits_are_those_of_brute_force(first):
    for seed in range(first, first + AT_ONCE):
        check_visits(np.random.default_rng(seed))


def check_visits(rng: np.random.Generator):
    # Few shapes, so that little is compiled.
    q_tile, kv_tile = ((8, 8), (8, 16), (16, 4))[rng.integers(3)]
    s, t = ((16, 16), (48, 64), (80, 16))[rng.integers(3)]
    mask = random_mask(rng, s, t)
    seen = np.broadcast_to(np.asarray(dense(mask, s, t))[0, 0], (s, t))
    lo, hi = row_ranges(mask, s, t)
    assert int(jnp.sum(hi - lo)) == seen.sum()  # pairs
    tiled = seen.reshape(s // q_tile, q_tile, t // kv_tile, kv_tile)
    some, whole = tiled.any(axis=(1, 3)), tiled.all(axis=(1, 3))
    for row in some:  # a tile between two that a tile of queries sees is visited as well
        found = np.flatnonzero(row)
        if found.size:
            row[found[0] : found[-1] + 1] = True
    of_queries = visits_of_queries(lo, hi, q_tile, kv_tile)
    assert_visits(of_queries, some, whole)
    assert_visits(visits_of_keys(of_queries, t // kv_tile), some.T, whole.T)


def assert_visits(visits, some, whole):
    for tile, (first, inner_first, inner_last, last) in enumerate(np.asarray(visits.packed)[0]):
        assert 0 <= first <= inner_first <= inner_last <= last
        spanned = np.flatnonzero(some[tile])
        if spanned.size == 0:
            assert first == last
            continue
        assert (first, last) == (spanned[0], spanned[-1] + 1)
        inner = np.zeros(some.shape[1], bool)
        inner[inner_first:inner_last] = True
        np.testing.assert_array_equal(inner, whole[tile])
