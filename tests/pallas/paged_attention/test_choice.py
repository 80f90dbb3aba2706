"""Who takes a call, why the kernel declines, and that flat tokens get what they got without it."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.pallas import Target, target
from colossax.pallas.attention import Heavy, Pages, RelativeBias, attend_cache, keys_and_values
from colossax.pallas.attention import paged as door
from colossax.pallas.attention.kept import HEAVY
from colossax.pallas.attention.pages import attend_pages, scores_of
from colossax.pallas.paged_attention import PagedSpec, api, choose, variants, xla
from colossax.pallas.paged_attention.proof import Sizes, trials
from colossax.pallas.paged_attention.spec import PagedVariant
from colossax.pallas.proof.trial import prove

pytestmark = pytest.mark.slow

HOPPER = Target(platform="gpu", compute_capability=(9, 0))
USUAL = PagedSpec(
    groups=8,
    width=1,
    heads=8,
    kv_heads=2,
    head_dim=128,
    v_head_dim=128,
    page_slots=16,
    pages=4,
    q_dtype=jnp.dtype("bfloat16"),
    dtype=jnp.dtype("bfloat16"),
)


def test_a_usual_call_goes_to_the_kernel_on_hopper_alone():
    assert choose(USUAL, HOPPER) == "mosaic"
    assert choose(USUAL, Target(platform="gpu", compute_capability=(8, 0))) == "xla"
    assert choose(USUAL, Target(platform="cpu")) == "xla"
    assert USUAL.variant in set(variants())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": jnp.dtype("float32")}, "takes keys and values of bfloat16 and float16, found"),
        ({"more": ("ALiBi",)}, "ALiBi is not available in the kernel"),
        ({"head_dim": 80, "v_head_dim": 80}, "heads of 80/80; there are 64, 128, 256"),
        ({"heads": 130}, "65 query heads share one of keys; the kernel takes 64"),
        ({"page_slots": 24}, "pages of 24 slots; the kernel takes 8, 16 and multiples of 64"),
        ({"page_slots": 4}, "pages of 4 slots"),
        ({"checked": True}, "give check_vma=False"),
    ],
)
def test_what_the_kernel_declines(changes, reason):
    spec = dataclasses.replace(USUAL, **changes)
    assert choose(spec, HOPPER) == "xla"
    for name, where in (("mosaic", HOPPER), ("interpret", Target(platform="cpu"))):
        with pytest.raises(NotImplementedError, match=f"paged_attention '{name}': .*{reason}"):
            choose(spec, where, name)


OPTIONS = {
    "plain": {},
    "window": {"window": (30, 0)},
    "chunk": {"chunk": 25},
    "capped": {"soft_cap": 1.0},
    "sinks": {"sinks": True},
}


def call(option, h=64):
    """Tokens of two seats in groups and padding, in any order; see `attend_pages`."""
    rng = np.random.default_rng(0)
    lengths, page, k, r = (40, 97), 16, 2, 2
    pages = sum(-(-length // page) for length in lengths) + 1
    table, order = rng.permutation(2 * pages)[: 2 * 8].reshape(2, 8) % pages, rng.permutation(pages)
    table[0, :3], table[1, :7] = order[:3], order[3:10]
    shape = (2, pages, page, k, h)
    keys, values, q = (rng.normal(size=x) for x in (shape, shape, (8, k, r, h)))
    seat = np.asarray([1, 1, -1, 0, 1, 0, 1, -1])
    position = np.asarray([96, 94, 0, 39, 95, 38, 93, 0])
    groups = np.asarray([[6, 1, 4], [0, -1, -1], [5, 3, -1], [7, -1, -1]])
    given = {"window": None, "chunk": None, "soft_cap": None, "slopes": None, "biases": ()}
    given |= OPTIONS[option]
    sinks = jnp.asarray(rng.normal(size=(k, r)), jnp.float32) if given.get("sinks") else None
    scores = scores_of(scale=0.2, **{**given, "sinks": sinks})
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in (q, keys, values)]
    ints = functools.partial(jnp.asarray, dtype=jnp.int32)
    where = {"seat": ints(seat), "position": ints(position), "scores": scores}
    return arrays, Pages(table=ints(table), groups=ints(groups)), where


@pytest.mark.catches("paged-door-window")
@pytest.mark.parametrize("option", OPTIONS)
def test_flat_tokens_get_through_the_door_what_they_got(option):
    (q, keys, values), pages, where = call(option)
    given = (q, {"k": keys, "v": values}, 1, pages)
    truth = jax.jit(lambda: attend_pages(*given, **where, read=keys_and_values))()
    door_to = functools.partial(door.attend_by_kernel, implementation="xla")
    found = jax.jit(lambda: door_to(*given, **where, read=keys_and_values, plain=True))()
    np.testing.assert_allclose(found, truth, rtol=2e-2, atol=2e-2)
    assert not np.asarray(found)[[2, 7]].any()


@pytest.mark.sweep
def test_flat_tokens_get_from_the_kernel_what_they_got():
    (q, keys, values), pages, where = call("window")
    given = (q, {"k": keys, "v": values}, 1, pages)
    truth = jax.jit(lambda: attend_pages(*given, **where, read=keys_and_values))()
    door_to = functools.partial(door.attend_by_kernel, implementation="interpret")
    found = jax.jit(lambda: door_to(*given, **where, read=keys_and_values, plain=True))()
    np.testing.assert_allclose(found, truth, rtol=2e-2, atol=2e-2)


def by_head(params, distance):
    return params.reshape(-1, *[1] * distance.ndim) * distance


def traced(heavy=False, **changes):
    """What `attend_cache` of a token is made of, for a Hopper that is not there."""
    shape = jax.ShapeDtypeStruct((1, 8, 16, 2, 64), jnp.bfloat16)
    cache = {"k": shape, "v": shape}
    pages = Pages(table=jnp.zeros((2, 4), jnp.int32), groups=jnp.zeros((1, 1), jnp.int32))
    one = jnp.zeros(1, jnp.int32)
    if heavy:
        two = jnp.ones(2, jnp.int32)
        pages = dataclasses.replace(pages, heavy=Heavy.of(two, two, one, one, 16))
        for name, dtype in zip(HEAVY, (jnp.float32, jnp.int32), strict=True):
            cache[name] = jax.ShapeDtypeStruct(shape.shape[:-1], dtype)
    where = {"seat": one, "position": one, "slot": one, "pages": pages, **changes}

    def step(q, cache):
        return attend_cache(q, {"k": q[:, :2], "v": q[:, :2]}, cache, 0, **where)

    q = jax.ShapeDtypeStruct((1, 4, 64), jnp.bfloat16)
    with target("gpu", compute_capability=(9, 0)):
        return str(jax.jit(step).trace(q, cache).jaxpr)


def test_the_cache_of_an_engine_goes_through_the_door():
    assert "wgmma" in traced()
    bias = RelativeBias(params=jnp.zeros(4), fn=by_head)
    assert "wgmma" not in traced(alibi_slopes=jnp.ones(4))
    assert "wgmma" not in traced(biases=[bias])
    assert "wgmma" not in traced(read=lambda held: (held["k"], held["v"]))


@pytest.mark.catches("counted-by-what-was-not-proved")
def test_seats_that_keep_heavy_hitters_ask_for_a_kernel_of_their_own(monkeypatch):
    """One that keeps logits, proved as such; others have theirs as before."""
    asked = []

    def chosen(spec, *given):
        asked.append(spec.variant)
        return choose(spec, *given)

    monkeypatch.setattr(door, "choose", chosen)
    assert traced(heavy=True).count("wgmma") == 2 * traced().count("wgmma")
    with_mass = dataclasses.replace(VARIANT, mass=True)
    assert asked == [VARIANT, with_mass, VARIANT]
    assert with_mass in set(variants())
    asked.clear()
    assert "wgmma" not in traced(heavy=True, read=lambda held: (held["k"], held["v"]))


SIZES = Sizes(
    small=(1, 70, 150), small_width=2, large=(64, 100), large_heads=(4, 2), small_heads=(4, 2)
)
VARIANT = PagedVariant(head_dim=64, dtype="bfloat16")
ALL = [
    VARIANT,
    dataclasses.replace(VARIANT, soft_cap=True),
    dataclasses.replace(VARIANT, mass=True),
    dataclasses.replace(VARIANT, words=True),
    dataclasses.replace(VARIANT, words=True, mass=True),
]


@pytest.mark.parametrize("variant", ALL, ids=str)
def test_a_right_kernel_is_proved(variant):
    found = prove(trials(variant, kernel="xla", sizes=SIZES))
    assert (found.outcome, found.reason) == ("proved", "")
    assert set(found.peers) == (set() if variant.words and variant.mass else {"xla"})


FAULTS = {
    "out": lambda out, lse, mass: (out.at[1, 0, 0].multiply(1.2), lse, mass),
    "lse": lambda out, lse, mass: (out, lse + 0.5, mass),
    "mass": lambda out, lse, mass: (
        out,
        lse,
        dataclasses.replace(mass, logits=jnp.flip(mass.logits, 3)),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_found(name, monkeypatch):
    wrong = types.ModuleType("kernels")
    wrong.why_not = lambda spec, target: None
    wrong.attend = lambda *given, **how: FAULTS[name](*xla.attend(*given, **how))
    monkeypatch.setitem(api.IMPLEMENTATIONS, "mosaic", wrong)
    found = prove([next(trials(ALL[-1], sizes=SIZES))])
    assert found.outcome == "declined", found.reason
    assert name in found.reason


@pytest.mark.sweep
def test_the_kernel_itself_is_proved():
    """Interpreted: as slow as it is, nothing is timed."""
    one = next(trials(ALL[-1], kernel="interpret", sizes=SIZES))
    found = prove([one])
    assert (found.outcome, found.reason) == ("proved", "")
