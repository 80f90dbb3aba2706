"""A cache in codes of eight bits against floats that its codes stand for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.pallas.attention import Pages, attend_cache, pages
from colossax.pallas.attention.codes import LARGEST, encoded
from tests.cases import quick_first
from tests.pallas.attention.test_pages import (
    ALL,
    EACH,
    HV,
    KV_HEADS,
    LAYERS,
    MOST,
    OPTIONS,
    SEATS,
    H,
    calls,
    drawn,
    paged,
    rows_of,
)

DTYPES = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}


def stands_for(x, form):
    """What codes of vectors stand for: NumPy's, in float64."""
    most = LARGEST[jnp.dtype(DTYPES[form]).name]
    x = np.asarray(x, np.float32)
    scale = np.abs(x).max(-1, keepdims=True) * np.float32(1 / most)
    scale = scale.astype(jnp.bfloat16).astype(np.float32)
    codes = np.clip(x / np.where(scale == 0, np.float32(1), scale), -most, most)
    codes = np.round(codes) if form == "int8" else codes.astype(jnp.float8_e4m3fn)
    return codes.astype(np.float64) * scale


def empty(form, rows, slots):
    """Codes and scales that others left behind: no numbers, where the type has such."""
    shape = (LAYERS, rows, slots, KV_HEADS)
    lost = jnp.full((), jnp.nan, jnp.float32) if form == "fp8" else jnp.full((), 77)
    codes = {name: jnp.full((*shape, w), lost.astype(DTYPES[form])) for name, w in WIDTHS.items()}
    scales = {f"{name}_scale": jnp.full(shape, jnp.nan, jnp.bfloat16) for name in WIDTHS}
    return codes | scales


WIDTHS = {"k": H, "v": HV}


@pytest.mark.catches("key-scales-not-of-logits")
@pytest.mark.catches("value-scales-left-behind")
@pytest.mark.parametrize("option", quick_first(OPTIONS, ["plain"]))
@pytest.mark.parametrize("form", DTYPES)
def test_pages_of_codes_are_read_as_what_they_stand_for(form, option, monkeypatch):
    """To 1e-5, in whatever chunks, beside what others left behind."""
    monkeypatch.setattr(pages, "KEYS_AT_ONCE", 8)
    rng = np.random.default_rng(2)
    q, k, v = drawn()
    table = paged(rng)
    options = dict(OPTIONS[option])
    step = jax.jit(functools.partial(attend_cache, **options))
    plain = jax.jit(functools.partial(attend_cache, **options))
    state, truth = empty(form, ALL, EACH), rows_of(SEATS, EACH * MOST)
    known = {n: jnp.asarray(stands_for(x, form), jnp.float32) for n, x in (("k", k), ("v", v))}
    for tokens, groups in calls(rng):
        seat, position = (jnp.asarray(x, jnp.int32) for x in zip(*tokens, strict=True))
        at = (jnp.maximum(seat, 0), position)
        where = {"seat": seat, "position": position, "slot": position}
        one = Pages(table=table, groups=jnp.asarray(groups, jnp.int32))
        new = {"k": k[at], "v": v[at]}
        out, state = step(q[at], new, state, jnp.int32(1), **where, pages=one)
        of_known = {name: x[at] for name, x in known.items()}
        expected, truth = plain(q[at], of_known, truth, jnp.int32(1), **where)
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", DTYPES)
def test_rows_of_codes_likewise(form):
    """Rows that are sequences, one and several."""
    q, k, v = drawn()
    for seats in (1, SEATS):
        seat = jnp.repeat(jnp.arange(seats, dtype=jnp.int32), 5)
        position = jnp.tile(jnp.arange(5, dtype=jnp.int32), seats)
        where = {"seat": seat, "position": position, "slot": position}
        new = {"k": k[seat, position], "v": v[seat, position]}
        out, _ = attend_cache(q[seat, position], new, zeros(form, seats, 8), 0, **where)
        new = {n: jnp.asarray(stands_for(x, form), jnp.float32) for n, x in new.items()}
        expected, _ = attend_cache(q[seat, position], new, rows_of(seats, 8), 0, **where)
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def zeros(form, rows, slots):
    return jax.tree.map(jnp.zeros_like, empty(form, rows, slots))


@pytest.mark.catches("codes-divided-by-other-scale")
@pytest.mark.parametrize("form", DTYPES)
def test_codes_are_those_of_numpy(form):
    """Vectors of any size, among them zeros; what is no number stays none."""
    x = np.random.default_rng(0).normal(size=(40, 3, 64)).astype(np.float32)
    x *= 10.0 ** np.random.default_rng(1).integers(-6, 6, (40, 3, 1))
    x[3] = 0
    codes, scale = encoded(jnp.asarray(x), DTYPES[form], jnp.bfloat16)
    found = np.asarray(codes).astype(np.float64) * np.asarray(scale, np.float64)[..., None]
    np.testing.assert_array_equal(found, stands_for(x, form))
    assert not found[3].any()
    worst = {"int8": 0.5 / 127 + 2**-9, "fp8": 2**-4 + 2**-9}[form]
    assert (np.abs(found - x).max(-1) <= worst * np.abs(x).max(-1)).all()
    x[5, 0, 7] = np.nan
    codes, scale = encoded(jnp.asarray(x), DTYPES[form], jnp.bfloat16)
    assert np.isnan(np.asarray(scale, np.float32)).nonzero()[0].tolist() == [5]
