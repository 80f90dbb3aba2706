"""What groups of seats see and what they give to each slot, in one pass over keys and in two."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.pallas.attention import Pages, counted, keys_and_values
from colossax.pallas.attention.pages import scores_of
from tests.pallas.attention import test_heavy as heavy
from tests.pallas.paged_attention.cases import PAGE, drawn, truth
from tests.pallas.places import everywhere, no_races

pytestmark = pytest.mark.slow

LAYER, LENGTHS = 1, (23, 40, 9, 66)
"""The third seat has no tokens in the call."""

SHAPES = {
    "decode": {"width": 1, "heads": 8},
    "decode, a head each": {"width": 1, "heads": 2},
    "prompts": {"width": 5, "heads": 8},
    "prompts, more rows than a tile": {"width": 16, "heads": 16, "lengths": (23, 40, 9, 30)},
    "pages of 64": {"width": 3, "heads": 4, "page": 64},
    "capped": {"width": 2, "heads": 4, "soft_cap": 1.5},
    "sinks": {"width": 1, "heads": 4, "page": 8, "sinks": True},
}
QUICK = ("prompts",)


def call(name, dtype=jnp.bfloat16):
    """Arguments of `attend_counted`, and what NumPy has of it in float64: outputs and masses."""
    how = dict(SHAPES[name])
    lengths, width = how.pop("lengths", LENGTHS), how.pop("width")
    given = {"scale": 0.2, "soft_cap": how.pop("soft_cap", None)}
    sinks = how.pop("sinks", False)
    q, keys, values, rows = drawn(lengths, h=64, width=width, **how)
    rng = np.random.default_rng(4)
    q, keys, values = (jnp.asarray(x, dtype) for x in (q, keys, values))
    mass = rng.uniform(size=keys.shape[:4]).astype(np.float32)
    sinks = jnp.asarray(rng.normal(size=q.shape[2:4]), jnp.float32) if sinks else None
    # Seats have different numbers of tokens, side by side behind padding.
    count = np.minimum([width, max(1, width - 2), 0, width], lengths)
    order = [1, 3, 0]
    tokens = [(seat, i) for seat in order for i in range(count[seat])]
    members = np.full((len(lengths), width), -1)
    for at, (seat, i) in enumerate(tokens):
        members[seat, i] = at + 1
    tokens = [(-1, 0), *tokens]
    seat, place = np.transpose([(s, lengths[s] - count[s] + i if s >= 0 else 0) for s, i in tokens])
    flat = jnp.stack([q[s, i] for s, i in tokens])
    pages = Pages(table=jnp.asarray(rows), groups=jnp.asarray(members, jnp.int32))
    scores = scores_of(**given, window=None, chunk=None, slopes=None, sinks=sinks, biases=())
    args = flat, {"k": keys, "v": values}, jnp.asarray(mass), LAYER, pages
    ints = functools.partial(jnp.asarray, dtype=jnp.int32)
    where = {"seat": ints(seat), "position": ints(place), "scores": scores}

    def sees(g, w):
        return range(place[members[g, w]] + 1 if members[g, w] >= 0 else 0)

    out, _, shares = truth(q, keys, values, LAYER, rows, sees, **given, sinks=sinks)
    expected = np.stack([out[max(s, 0), i] * (s >= 0) for s, i in tokens])
    total = mass.astype(np.float64)
    for g, w, slot in np.ndindex(len(lengths), width, max(lengths)):
        page = keys.shape[2]
        total[LAYER, rows[g, slot // page] % keys.shape[1], slot % page] += shares[g, w, :, slot]
    return args, where, (expected, total)


def run(args, where, place):
    """By an implementation of `paged_attention`, or without."""
    how = {"plain": place is not None, "implementation": place or "auto"}
    step = jax.jit(
        functools.partial(counted.attend_counted, **where, read=keys_and_values, **how),
    )
    return jax.block_until_ready(step(*args))


def check(found, expected):
    out, mass = (np.asarray(x, np.float64) for x in found)
    np.testing.assert_allclose(out, expected[0], rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(mass, expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.catches("counted-what-nobody-sees")
@pytest.mark.parametrize("form", ["xla", None], ids=["one pass", "two passes"])
@pytest.mark.parametrize("name", SHAPES)
def test_plain_forms_are_those_of_numpy(name, form):
    args, where, expected = call(name)
    check(run(args, where, form), expected)


@everywhere
@pytest.mark.catches("paged-logits-of-some-tiles")
@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.sweep) for n in SHAPES]
)
def test_the_kernel_gives_both_in_one_pass(name, place):
    args, where, expected = call(name)
    found = run(args, where, place)
    assert no_races(place)
    check(found, expected)


@pytest.mark.catches("counted-seats-left-out")
@pytest.mark.catches("counted-slots-twice")
@pytest.mark.parametrize("seats", [1, 3])
def test_some_seats_and_some_slots_at_a_time(seats, monkeypatch):
    """Of four and of six pages: the last ones are fewer."""
    args, where, expected = call("prompts")
    width, most = args[4].groups.shape[1], args[4].table.shape[1]
    assert most == 6
    monkeypatch.setattr(counted, "SLOTS_AT_ONCE", 4 * PAGE)
    monkeypatch.setattr(counted, "LOGITS_BYTES", 4 * seats * width * 8 * most * PAGE)
    check(run(args, where, "xla"), expected)


def taken(monkeypatch, form):
    """Seats that keep heavy hitters take this implementation, whatever the device is."""
    monkeypatch.setattr(counted, "chosen_for", lambda *given, **how: form)


@pytest.mark.parametrize("form", ["xla", pytest.param("interpret", marks=pytest.mark.sweep)])
def test_heads_keep_by_the_kernel_what_they_kept(form, monkeypatch):
    """Prompts in chunks, page by page, beside a seat that keeps all."""
    each, h = 8, 64
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in heavy.drawn(max(heavy.LENGTHS), h, h))
    q, k, v = (np.asarray(x, np.float32) for x in (q / 8, k, v))
    cuts = list(heavy.calls(np.random.default_rng(2), each))
    expected = heavy.served(cuts, q, k, v, each, jnp.bfloat16)
    taken(monkeypatch, form)
    out, places, masses = heavy.served(cuts, q, k, v, each, jnp.bfloat16)
    assert no_races(form)
    np.testing.assert_allclose(out, expected[0], rtol=2e-2, atol=2e-2)
    for found, wanted in zip((places, masses), expected[1:], strict=True):
        for seat, (one, other) in enumerate(zip(found, wanted, strict=True)):
            if heavy.KEPT[seat] != (0, 0):
                np.testing.assert_allclose(one, other, rtol=1e-5)
