"""Mosaic's gradients of attention, interpreted, against dense float64; races are looked for."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.pallas.attention import Mask, row_ranges
from colossax.pallas.attention.mosaic_gpu.backward import gradients
from colossax.pallas.attention.mosaic_gpu.backward_keys import APART_REGISTERS, _split
from colossax.pallas.attention.mosaic_gpu.backward_operands import (
    COPY_REGISTERS,
    compute_registers,
)
from colossax.pallas.attention.mosaic_gpu.backward_tiles import tiles_for
from colossax.pallas.target import on_device
from tests.cases import quick_first
from tests.pallas.places import everywhere, no_races

TOLERANCE = 5e-3


def truth(q, k, v, dout, dlse, lo, hi, bias, scale, soft_cap):
    """Dense in float64: lse, delta = rowsum(out dout) - dlse, and dq, dk, dv, dbias."""
    q, k, v, dout, dlse = (np.asarray(x, np.float64) for x in (q, k, v, dout, dlse))
    group = q.shape[2] // k.shape[2]
    wide_k, wide_v = (np.repeat(x, group, axis=2) for x in (k, v))
    scores = np.einsum("bsnh,btnh->bnst", q, wide_k) * scale
    slope = np.ones_like(scores)
    if soft_cap is not None:
        tanh = np.tanh(scores / soft_cap)
        scores, slope = soft_cap * tanh, 1 - tanh**2
    logits = scores if bias is None else scores + np.asarray(bias, np.float64)
    key = np.arange(k.shape[1])
    seen = (key >= np.asarray(lo)[..., None]) & (key < np.asarray(hi)[..., None])
    weights = np.where(seen[:, None], np.exp(logits), 0.0)
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.log(total[..., 0])
    p = weights / np.where(total == 0, 1, total)
    out = np.einsum("bnst,btnh->bsnh", p, wide_v)
    delta = np.einsum("bsnh,bsnh->bns", out, dout) - dlse
    dlogits = p * (np.einsum("bsnh,btnh->bnst", dout, wide_v) - delta[..., None])
    ds = dlogits * slope * scale

    def grouped(x):
        return x.reshape(*k.shape[:3], group, x.shape[-1]).sum(3)

    dq = np.einsum("bnst,btnh->bsnh", ds, wide_k)
    dk = grouped(np.einsum("bnst,bsnh->btnh", ds, q))
    dv = grouped(np.einsum("bnst,bsnh->btnh", p, dout))
    if bias is None:
        return lse, delta, (dq, dk, dv)
    reduced = tuple(i for i in range(2) if bias.shape[i] == 1)
    return lse, delta, (dq, dk, dv, dlogits.sum(reduced, keepdims=True))


def packed(*lengths, padding=0):
    """Segments of documents one behind the other, padding last, `[1, s]`."""
    segments = [np.full(length, i) for i, length in enumerate(lengths)]
    return np.concatenate([*segments, np.full(padding, -1)])[None].astype(np.int32)


def segments(*rows):
    """Of queries and keys alike."""
    found = jnp.asarray(np.concatenate(rows))
    return {"q_segments": found, "kv_segments": found}


# On many multiprocessors each query head of a group has a block of its own, unless said otherwise.
CASES = {
    "head size 128, causal, grouped heads": {
        "mask": Mask(causal=True, q_positions=jnp.arange(50, 150)[None]),
        "s": 100,
        "t": 150,
        "n": 2,
        "h": 128,
    },
    "head size 128, a window, a bias, soft cap, in float32": {
        "mask": Mask(causal=True, window=(40, 0)),
        "s": 72,
        "h": 128,
        "bias": (1, 1),
        "soft_cap": 3.0,
        "dtype": jnp.float32,
    },
    "full, grouped heads": {"n": 4, "k": 2, "t": 64, "multiprocessors": 2},
    # More tiles than stages, with a mask and without.
    "causal, behind other keys": {
        "mask": Mask(causal=True, q_positions=jnp.arange(120, 248)[None]),
        "t": 256,
    },
    "a window, one kv head, in float32": {
        "mask": Mask(causal=True, window=(70, 0)),
        "n": 2,
        "dtype": jnp.float32,
    },
    "documents and padding, two rows": {
        "mask": Mask(causal=True, **segments(packed(50, 78), packed(20, 70, padding=38))),
        "b": 2,
    },
    "chunks of a zigzag, soft cap": {
        "mask": Mask(
            causal=True,
            q_positions=jnp.concatenate([jnp.arange(64, 128), jnp.arange(384, 448)])[None],
            kv_positions=jnp.concatenate([jnp.arange(64), jnp.arange(400, 464)])[None],
        ),
        "soft_cap": 2.0,
    },
    "odd lengths, rows that see nothing": {
        "mask": Mask(
            causal=True,
            q_segments=jnp.asarray(packed(69, padding=52)),
            kv_segments=jnp.asarray(packed(87)),
        ),
        "s": 121,
        "t": 87,
    },
    "a bias of all heads, soft cap": {"bias": (1, 1), "n": 2, "t": 64, "soft_cap": 3.0},
    "a bias of all rows": {
        "bias": (1, 1),
        "b": 2,
        "mask": Mask(causal=True, **segments(packed(128), packed(64, padding=64))),
    },
    "float16, values narrower than keys": {"half": jnp.float16, "h": 192, "hv": 128, "t": 64},
    "two heads of a group in a block": {"n": 4, "t": 100, "multiprocessors": 2},
}


CATCHES = {
    "head size 128, causal, grouped heads": pytest.mark.catches("kernel-scale-backward"),
    "full, grouped heads": pytest.mark.catches("kernel-kv-head-of-queries"),
    "chunks of a zigzag, soft cap": pytest.mark.catches("kernel-soft-cap-gradient"),
}


@pytest.mark.sentinel("head size 128, causal, grouped heads-interpret")
@everywhere
@pytest.mark.parametrize("name", quick_first(CASES, 2, CATCHES))
def test_gradients_are_those_of_dense_float64(name, place):
    case = {"mask": Mask(), "s": 128, "t": None, "b": 1, "n": 1, "k": 1, "h": 64, "hv": None}
    case |= {"half": jnp.bfloat16, "dtype": None, "bias": None, "soft_cap": None} | CASES[name]
    b, s, n, h, half = (case[x] for x in ("b", "s", "n", "h", "half"))
    t, hv = case["t"] or s, case["hv"] or h
    rng = np.random.default_rng(0)

    def normal(*shape, dtype=half):
        return jnp.asarray(rng.normal(size=shape), dtype)

    q, k, v = normal(b, s, n, h), normal(b, t, case["k"], h), normal(b, t, case["k"], hv)
    dout, dlse = normal(b, s, n, hv), normal(b, n, s, dtype=jnp.float32)
    bias = None if case["bias"] is None else normal(*case["bias"], s, t, dtype=jnp.float32)
    lo, hi = case.get("ranges") or row_ranges(case["mask"], s, t)
    scale = h**-0.5
    lse, delta, want = truth(q, k, v, dout, dlse, lo, hi, bias, scale, case["soft_cap"])
    found = gradients(
        q,
        k,
        v,
        lo=lo,
        hi=hi,
        bias=bias,
        dout=dout,
        lse=jnp.asarray(lse, jnp.float32),
        delta=jnp.asarray(delta, jnp.float32),
        scale=scale,
        soft_cap=case["soft_cap"],
        dtype=case["dtype"] or half,
        interpret=place == "interpret",
        multiprocessors=case.get("multiprocessors"),
    )
    jax.block_until_ready(found)
    assert no_races(place)
    assert len([x for x in found if x is not None]) == len(want)
    for name, got, exact in zip(("dq", "dk", "dv", "dbias"), found, want, strict=False):
        assert got.shape == exact.shape
        error = np.linalg.norm(np.asarray(got, np.float64) - exact) / np.linalg.norm(exact)
        assert error < TOLERANCE, (name, error)


@pytest.mark.parametrize(
    ("group", "blocks", "parts"),
    [(1, 4, 1), (8, 132, 1), (8, 131, 2), (8, 64, 4), (12, 50, 3), (4, 1, 4), (7, 100, 7)],
)
def test_heads_of_a_group_are_split_until_no_multiprocessor_is_idle(group, blocks, parts):
    assert _split(group, blocks, 132) == parts


def test_one_kv_head_fills_the_multiprocessors_that_a_device_has():
    wide = [jnp.zeros((1, 8192, heads, 128), jnp.bfloat16) for heads in (32, 1, 1, 32)]
    bounds = [jnp.zeros((1, 8192), jnp.int32)] * 2
    row = jnp.zeros((1, 32, 8192))

    def run(q, k, v, dout, lo, hi, row):
        given = {"lo": lo, "hi": hi, "dout": dout, "lse": row, "delta": row}
        return gradients(q, k, v, **given, scale=0.1, dtype=jnp.bfloat16)

    for count, parts in ((132, 4), (64, 1)):
        hopper = {"platform": "cuda", "compute_capability": "9.0", "core_count": count}
        with on_device(types.SimpleNamespace(**hopper)):
            text = str(jax.make_jaxpr(run)(*wide, *bounds, row))
        assert f"grid=(1, {parts}, 64)" in text


def test_head_sizes_without_tiles_are_refused():
    with pytest.raises(ValueError, match=r"no tiles for head sizes 80 of keys and 80 of values"):
        tiles_for(80, 80, biased=False, soft_cap=False)


def test_warpgroups_ask_for_no_more_registers_than_a_block_starts_with():
    # More would never be granted, and the kernel never end.
    for warpgroups in (1, 2, 3):
        start = 65536 // (128 * (warpgroups + 1)) // 8 * 8 * (warpgroups + 1)
        asked = COPY_REGISTERS + warpgroups * compute_registers(warpgroups)
        assert asked <= start
    assert sum(APART_REGISTERS.values()) <= 3 * (65536 // (128 * 3) // 8 * 8)
