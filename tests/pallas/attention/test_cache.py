"""Attention to a cache against attention over whole sequences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.errors import InputError
from colossax.pallas.attention import Mask, attend_cache, attention, seats

LAYERS, SEATS, SLOTS, HEADS, KV_HEADS, H, HV = 2, 3, 16, 4, 2, 8, 6
LENGTHS = [9, 14, 5]
OPTIONS = {
    "plain": {},
    "window": {"window": (3, 0)},
    "alibi": {"alibi_slopes": jnp.asarray([0.5, 0.2, 0.1, 0.05])},
    "capped": {"soft_cap": 1.0, "scale": 0.7},
}


def sequences():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (HEADS, H), (KV_HEADS, H), (KV_HEADS, HV)
    return tuple(
        jax.random.normal(r, (SEATS, SLOTS, *x)) for r, x in zip(keys, shapes, strict=True)
    )


def empty(seats=SEATS, slots=SLOTS):
    """Old tokens of former sequences lie around."""
    shape = (LAYERS, seats, slots, KV_HEADS)
    return {"k": jnp.full((*shape, H), 7.0), "v": jnp.full((*shape, HV), 9.0)}


def calls(rng):
    """Tokens of all sequences in an order that never puts a later one before an earlier call."""
    left = [0] * SEATS
    while any(done < length for done, length in zip(left, LENGTHS, strict=True)):
        tokens = []
        for seat, length in enumerate(LENGTHS):
            count = int(rng.integers(0, 5))
            tokens += [(seat, p) for p in range(left[seat], min(length, left[seat] + count))]
            left[seat] = min(length, left[seat] + count)
        tokens += [(-1, 0)] * (12 - len(tokens))
        yield [tokens[i] for i in rng.permutation(len(tokens))]


@pytest.mark.catches("cache-sees-next")
@pytest.mark.parametrize(
    "option, bytes_at_once", [*((option, 2**26) for option in OPTIONS), ("window", 1)]
)
def test_flat_tokens_see_what_their_sequence_sees(option, bytes_at_once, monkeypatch):
    """Chunks of prompts and single tokens, mixed, padded and shuffled, in the second layer."""
    monkeypatch.setattr(seats, "GATHERED_BYTES", bytes_at_once)
    q, k, v = sequences()
    options = dict(OPTIONS[option])
    step = jax.jit(functools.partial(attend_cache, **options))
    state, found = empty(), np.full((SEATS, SLOTS, HEADS, HV), np.nan)
    for tokens in calls(np.random.default_rng(1)):
        seat, position = (jnp.asarray(x, jnp.int32) for x in zip(*tokens, strict=True))
        at = (jnp.maximum(seat, 0), position)
        out, state = step(
            q[at],
            {"k": k[at], "v": v[at]},
            state,
            jnp.int32(1),
            seat=seat,
            position=position,
            slot=position,
        )
        assert not np.asarray(out)[np.asarray(seat) < 0].any()
        for (s, p), row in zip(tokens, np.asarray(out), strict=True):
            if s >= 0:
                found[s, p] = row
    window = options.pop("window", None)
    mask = Mask(causal=True, window=window)
    expected = attention(q, k, v, mask=mask, implementation="reference", **options)
    for seat, length in enumerate(LENGTHS):
        np.testing.assert_allclose(found[seat, :length], expected[seat, :length], atol=1e-5)
    # The other layer is untouched, and so are slots beyond each sequence.
    assert (state["k"][0] == 7.0).all() and (state["v"][0] == 9.0).all()
    for seat, length in enumerate(LENGTHS):
        assert (state["k"][1, seat, length:] == 7.0).all()
        np.testing.assert_array_equal(state["k"][1, seat, :length], k[seat, :length])


@pytest.mark.catches("window-turns")
@pytest.mark.catches("window-empty-slots")
def test_slots_taken_in_turn_hold_the_window():
    """Seven of them do for three keys before a token and calls with four tokens of a seat."""
    q, k, v = sequences()
    step = jax.jit(functools.partial(attend_cache, window=(3, 0), **OPTIONS["alibi"]))
    whole, few = empty(), empty(slots=7)
    for tokens in calls(np.random.default_rng(2)):
        seat, position = (jnp.asarray(x, jnp.int32) for x in zip(*tokens, strict=True))
        at, where = (jnp.maximum(seat, 0), position), {"seat": seat, "position": position}
        call = (q[at], {"k": k[at], "v": v[at]})
        expected, whole = step(*call, whole, jnp.int32(1), **where, slot=position)
        found, few = step(*call, few, jnp.int32(1), **where, slot=position)
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_one_seat_is_a_case_of_many():
    q, k, v = (x[0] for x in sequences())
    positions = jnp.arange(SLOTS)
    alone, _ = attend_cache(
        q,
        {"k": k, "v": v},
        empty(1),
        0,
        seat=jnp.zeros(SLOTS, int),
        position=positions,
        slot=positions,
    )
    among, _ = attend_cache(
        q,
        {"k": k, "v": v},
        empty(3),
        0,
        seat=jnp.full(SLOTS, 2),
        position=positions,
        slot=positions,
    )
    np.testing.assert_allclose(alone, among, atol=1e-6)


@pytest.mark.catches("cache-padding-writes")
def test_tokens_outside_of_the_cache_write_nothing():
    q, k, v = (x[0, :3] for x in sequences())
    _, state = attend_cache(
        q,
        {"k": k, "v": v},
        empty(),
        0,
        seat=jnp.asarray([-1, SEATS, 1]),
        position=jnp.asarray([0, 0, SLOTS]),
        slot=jnp.asarray([0, 0, SLOTS]),
    )
    assert (state["k"] == 7.0).all() and (state["v"] == 9.0).all()


@pytest.mark.parametrize("window", [None, (99, 0)])
def test_carried_through_a_scan_the_cache_is_written_in_place(window):
    """No buffer as large as the cache beside the donated one."""
    slots = 4096
    shape = (8, 1, slots, KV_HEADS, H)
    state = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name in ("k", "v")}
    token = {name: jnp.zeros(1, jnp.int32) for name in ("seat", "position", "slot")}

    def step(x, state):
        def layer(carry, index):
            x, state = carry
            new = {"k": x[:, :2], "v": x[:, :2]}
            out, state = attend_cache(x, new, state, index, **token, window=window)
            return (out, state), None

        return jax.lax.scan(layer, (x, state), jnp.arange(8))[0]

    x = jax.ShapeDtypeStruct((1, HEADS, H), jnp.float32)
    compiled = jax.jit(step, donate_argnums=1).lower(x, state).compile()
    whole = np.prod(shape) * 4
    assert compiled.memory_analysis().alias_size_in_bytes == 2 * whole
    assert compiled.memory_analysis().temp_size_in_bytes < whole / 2


def test_a_token_brings_what_the_cache_holds():
    where = {name: jnp.zeros(1, jnp.int32) for name in ("seat", "position", "slot")}
    new = {"k": jnp.zeros((1, KV_HEADS, H))}
    with pytest.raises(InputError, match="the cache holds k, v, and the tokens bring k; give"):
        attend_cache(jnp.zeros((1, HEADS, H)), new, empty(), 0, **where)


def test_a_cache_in_sixteen_bits():
    q, k, v = (x[0].astype(jnp.bfloat16) for x in sequences())
    positions = jnp.arange(SLOTS)
    state = {name: x.astype(jnp.bfloat16) for name, x in empty().items()}
    where = {"seat": jnp.zeros(SLOTS, int), "position": positions, "slot": positions}
    out, state = attend_cache(q, {"k": k, "v": v}, state, 0, **where)
    assert out.dtype == jnp.bfloat16 and state["k"].dtype == jnp.bfloat16
    expected = attention(q[None], k[None], v[None], mask=Mask(causal=True))[0]
    np.testing.assert_allclose(*(x.astype(jnp.float32) for x in (out, expected)), atol=5e-2)
