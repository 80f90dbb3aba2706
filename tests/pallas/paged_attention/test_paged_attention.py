"""Attention to pages, its plain form and the kernel, against float64, slot by slot."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.pallas.paged_attention import Seen, paged_attention
from colossax.pallas.paged_attention.mosaic_gpu.attend import attend
from tests.pallas.paged_attention.cases import drawn, truth
from tests.pallas.places import everywhere, no_races

pytestmark = pytest.mark.slow

LENGTHS = (9, 150, 64)
LAYER = 1
ANCESTORS = [(0,), (0, 1), (0, 2), (0, 1, 3), (40,)]
"""Of the tokens of a tree, the slots behind what is settled that each sees."""


def plain(lengths=LENGTHS):
    """A token of each sequence sees all of it."""
    seen = Seen(lo=zeros(len(lengths), 1), hi=ints(lengths)[:, None])
    return seen, lambda g, w: range(lengths[g])


def chunk(width, left=10**6, lengths=LENGTHS):
    """The last tokens of each sequence, each up to itself, `left` before; one has fewer."""
    first = np.asarray(lengths) - width + 1
    hi = np.maximum(first[:, None] + np.arange(width), 0)
    hi[-1, width // 2 :] = 0
    lo = np.maximum(hi - 1 - left, 0)
    return Seen(lo=ints(lo), hi=ints(hi)), lambda g, w: range(lo[g, w], hi[g, w])


def tree(lengths=(9, 150, 105)):
    """Tokens that see what is settled and their ancestors; of one sequence nothing is proposed."""
    base = np.asarray(lengths) - 41 * np.asarray([0, 1, 1])
    base[0] = 9
    words = np.zeros((len(lengths), len(ANCESTORS), 2), np.uint32)
    for w, ancestors in enumerate(ANCESTORS):
        for slot in ancestors:
            words[1:, w, slot // 32] |= np.uint32(1 << slot % 32)
    hi = np.broadcast_to(base[:, None], words.shape[:2])
    seen = Seen(lo=jnp.zeros_like(ints(hi)), hi=ints(hi), base=ints(base), words=jnp.asarray(words))

    def sees(g, w):
        return [*range(base[g]), *(base[g] + slot for slot in (ANCESTORS[w] if g else ()))]

    return seen, sees


def ints(x):
    return jnp.asarray(x, jnp.int32)


def zeros(*shape):
    return jnp.zeros(shape, jnp.int32)


CASES = {
    "decode": ({"h": 64}, plain, {"mass": True}),
    "chunk under a window": ({"h": 64, "width": 6}, functools.partial(chunk, 6, 70), {}),
    "more rows than a tile": (
        {"h": 64, "width": 20, "heads": 8},
        functools.partial(chunk, 20),
        {"mass": True},
    ),
    "tree": ({"h": 64, "width": 5, "lengths": (9, 150, 105)}, tree, {"mass": True}),
    "capped": ({"h": 64, "page": 128}, plain, {"soft_cap": 2.0}),
    "sinks": ({"h": 64, "page": 8}, plain, {"sinks": True, "mass": True}),
    "heads of 128": ({"h": 128, "heads": 2}, plain, {}),
    "heads of 256": ({"h": 256}, plain, {}),
}
QUICK = ("decode", "tree")


def operands(name, dtype=jnp.bfloat16):
    """Arrays in the dtype, what tokens see in both forms, and options."""
    how, kind, options = CASES[name]
    given = {"lengths": LENGTHS, "heads": 4, **how}
    *arrays, rows = drawn(given.pop("lengths"), **given)
    arrays = [jnp.asarray(x, dtype) for x in arrays]
    seen, sees = kind()
    options = {"soft_cap": None, "mass": False, "scale": 0.3 / given["h"] ** 0.25, **options}
    sinks = jnp.asarray(np.random.default_rng(3).normal(size=arrays[0].shape[2:4]) * 3, jnp.float32)
    options["sinks"] = sinks if options.get("sinks") else None
    return arrays, rows, seen, sees, options


def close(found, want, tolerance):
    for one, exact in zip(found, want, strict=True):
        if one is None:
            continue
        one = np.asarray(one, np.float64)
        np.testing.assert_array_equal(np.isneginf(one), np.isneginf(exact))
        finite = ~np.isneginf(exact)
        scale = np.linalg.norm(exact[finite])
        assert np.linalg.norm(one[finite] - exact[finite]) <= tolerance * scale


def exact(arrays, rows, sees, options):
    given = {name: options[name] for name in ("scale", "soft_cap", "sinks")}
    return truth(*arrays, LAYER, rows, sees, **given)


@pytest.mark.catches("paged-word-shift")
@pytest.mark.parametrize("name", CASES)
def test_the_plain_form_is_what_is_written_down(name):
    arrays, rows, seen, sees, options = operands(name, jnp.float32)
    run = jax.jit(functools.partial(paged_attention, implementation="xla", **options))
    out, lse, mass = run(*arrays, LAYER, rows=ints(rows), seen=seen)
    assert (mass is None) is not options["mass"]
    close((out, lse, given(mass, rows, arrays[1])), exact(arrays, rows, sees, options), 1e-5)


def given(mass, rows, keys):
    """What was given to all slots, asked for page by page."""
    page = keys.shape[-3]
    parts = [] if mass is None else [mass.of(i * page, page) for i in range(rows.shape[1])]
    return jnp.concatenate(parts, axis=-1) if parts else None


def kernel(q, keys, values, rows, seen, *, place, blocks=1, part=64, **options):
    """The kernel, of parts so short that sequences have several."""
    pages = keys.shape[1]
    flat = (x.reshape(-1, *x.shape[2:]) for x in (keys, values))
    where = jnp.clip(rows, 0, pages - 1) + LAYER * pages
    how = {"blocks": blocks, "part": part, "interpret": place == "interpret"}
    out, lse, mass = attend(q, *flat, rows=where, seen=seen, **how, **options)
    return jnp.moveaxis(out, 1, 2), jnp.moveaxis(lse, 1, 2), given(mass, rows, keys)


@everywhere
@pytest.mark.catches("paged-values-of-nobody")
@pytest.mark.catches("paged-parts-alike")
@pytest.mark.catches("paged-ancestors")
@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.sweep) for n in CASES]
)
def test_the_kernel_is_what_is_written_down(name, place):
    dtype = jnp.float16 if name == "capped" else jnp.bfloat16
    arrays, rows, seen, sees, options = operands(name, dtype)
    run = jax.jit(functools.partial(kernel, place=place, **options))
    found = jax.block_until_ready(run(*arrays, ints(rows), seen))
    assert no_races(place)
    close(found, exact(arrays, rows, sees, options), 4e-3)


@everywhere
@pytest.mark.catches("paged-parts-by-company")
def test_company_changes_no_bit(place):
    """The same sequence with others, in other pages, by other blocks."""
    (q, keys, values), rows, seen, _, options = operands("decode")
    run = functools.partial(kernel, place=place, part=128, **options)
    together = jax.block_until_ready(jax.jit(run)(q, keys, values, ints(rows), seen))
    # Pages in another order, the second sequence alone, behind one that sees nothing.
    order = np.random.default_rng(5).permutation(keys.shape[1])
    moved = [x[:, order] for x in (keys, values)]
    place_of = np.argsort(order)
    own = place_of[np.clip(rows[[0, 1]], 0, len(order) - 1)]
    alone = Seen(lo=seen.lo[:2], hi=seen.hi[:2].at[0].set(0))
    apart = jax.jit(functools.partial(run, blocks=2))(q[:2], *moved, ints(own), alone)
    for one, other in zip(together, apart, strict=True):
        np.testing.assert_array_equal(np.asarray(one)[1], np.asarray(other)[1])
    assert not np.asarray(apart[0])[0].any()


BAD = {
    "keys": ({"keys": jnp.zeros((2, 8, 16, 3, 64))}, "do not fit; they are"),
    "dtype": ({"values": jnp.zeros((2, 8, 16, 2, 64), jnp.float16)}, "values of float16; cast one"),
    "rows": ({"rows": zeros(3, 0)}, "no dim may be 0"),
    "lo": ({"seen": Seen(lo=zeros(3, 2), hi=zeros(3, 1))}, r"seen.lo \(3, 2\) is not \(3, 1\)"),
    "base": ({"seen": Seen(lo=zeros(3, 1), hi=zeros(3, 1), base=zeros(3))}, "give both or none"),
    "sinks": ({"sinks": jnp.zeros(4)}, r"sinks \(4,\) are not \(2, 2\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused(name):
    change, said = BAD[name]
    pages = jnp.zeros((2, 8, 16, 2, 64))
    seen = Seen(lo=zeros(3, 1), hi=zeros(3, 1))
    given = {"keys": pages, "values": pages, "rows": zeros(3, 4), "seen": seen, **change}
    keys, values = given.pop("keys"), given.pop("values")
    # Annotations are checked in tests only; what a user sees is behind them.
    call = paged_attention.__wrapped__
    with pytest.raises(ValueError, match=said):
        call(jnp.zeros((3, 1, 2, 2, 64)), keys, values, 0, scale=1.0, **given)
