"""Trees of guesses in pages against what each token sees, slot by slot, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.pallas import target
from colossax.pallas.attention import Branches, Pages, attend_cache, cache, paged
from colossax.pallas.paged_attention import variants
from tests.pallas.places import no_races

pytestmark = pytest.mark.slow

PAGE, MOST, KV_HEADS, RATIO, H = 16, 8, 2, 2, 64
NODES, NOWHERE, WIDTH, SCALE = 40, 2**30, 16, 0.2
BEGIN = (37, NOWHERE, 90)
"""Of three seats: a tree in three groups, a piece of a prompt, and a tree without room for all."""

ROOM = (80, 32, 96)
ASKED = {0: range(NODES), 1: range(20, 24), 2: range(8)}
"""By seat, nodes of its tree, or positions."""

OPTIONS = {
    "plain": {},
    "window": {"window": (4, 0)},
    "window over the root": {"window": (2, 0), "nodes": 12},
    "chunk": {"chunk": 13},
    "capped": {"soft_cap": 1.0},
    "sinks": {"sinks": True},
}


def trees(rng, nodes):
    """Parents and depths of random trees, and the line of each node."""
    parent = np.asarray([[rng.integers(0, i + 1) for i in range(nodes - 1)] for _ in BEGIN])
    depth, line = np.zeros((len(BEGIN), nodes), int), np.zeros((len(BEGIN), nodes, nodes), bool)
    line[:, 0, 0] = True
    for seat, node in np.ndindex(len(BEGIN), nodes - 1):
        up = parent[seat, node]
        depth[seat, node + 1] = depth[seat, up] + 1
        line[seat, node + 1] = line[seat, up]
        line[seat, node + 1, node + 1] = True
    return depth, line


def words(bits):
    """`[..., n]` as numbers of 32 bits, the lowest first."""
    bits = np.pad(bits, [(0, 0)] * (bits.ndim - 1) + [(0, -bits.shape[-1] % 32)])
    return np.packbits(bits, axis=-1, bitorder="little").view(np.uint32)


def drawn(option):
    """Arguments of `attend_cache`, and what it gives to tokens that have a slot."""
    rng = np.random.default_rng(4)
    given = dict(OPTIONS[option])
    nodes = given.pop("nodes", NODES)
    depth, line = trees(rng, nodes)
    tokens = [
        (seat, x, BEGIN[seat] + depth[seat, x], BEGIN[seat] + x, words(line[seat, x]))
        if BEGIN[seat] < NOWHERE
        else (seat, x, x, x, np.full(-(-nodes // 32), 2**32 - 1, np.uint32))
        for seat, asked in ASKED.items()
        for x in asked
        if x < nodes or BEGIN[seat] == NOWHERE
    ]
    groups = []
    for one in ASKED:
        own = [i for i, (seat, *_) in enumerate(tokens) if seat == one]
        groups += [own[i : i + WIDTH] for i in range(0, len(own), WIDTH)]
    groups = [group + [-1] * (WIDTH - len(group)) for group in [*groups, []]]
    seat, node, position, slot, bits = (np.asarray(x) for x in zip(*tokens, strict=True))
    slot = np.where(slot < np.asarray(ROOM)[seat], slot, -1)
    # Pages in any order, and what belongs to nobody is no number.
    counts = [room // PAGE for room in ROOM]
    order, table = rng.permutation(sum(counts) + 2), rng.integers(0, 8, (len(ROOM), MOST))
    sequences = rng.normal(size=(2, len(ROOM), MOST * PAGE, KV_HEADS, H))
    held = np.full((2, 2, len(order), PAGE, KV_HEADS, H), np.nan)
    at = 0
    for i, count in enumerate(counts):
        table[i, :count] = order[at : at + count]
        at += count
        for place in range(min(BEGIN[i], 20) if BEGIN[i] == NOWHERE else BEGIN[i]):
            held[:, 1, table[i, place // PAGE], place % PAGE] = sequences[:, i, place]
    q = rng.normal(size=(len(tokens), KV_HEADS * RATIO, H))
    k, v = (x[seat, np.where(slot < 0, 0, slot)] for x in sequences)
    sinks = rng.normal(size=KV_HEADS * RATIO) if given.pop("sinks", False) else None
    ints = functools.partial(jnp.asarray, dtype=jnp.int32)
    branches = Branches(begin=ints(BEGIN), depth=ints(depth), line=jnp.asarray(bits))
    pages = Pages(table=ints(table), groups=ints(groups), branches=branches)
    where = {"seat": ints(seat), "position": ints(position), "slot": ints(slot), "pages": pages}
    options = {**given, "scale": SCALE, "sinks": None if sinks is None else jnp.asarray(sinks)}
    expected = np.full(q.shape, np.nan)
    for i in np.flatnonzero(slot >= 0):
        seen = sees(given, position[i], BEGIN[seat[i]], depth[seat[i]], line[seat[i]], node[i])
        expected[i] = softmaxed(q[i], *sequences[:, seat[i], seen], given.get("soft_cap"), sinks)
    return (q, {"k": k, "v": v}, dict(zip("kv", held, strict=True)), 1), where | options, expected


def sees(given, position, begin, depth, line, node):
    """Slots, one by one."""
    places = {slot: slot for slot in range(min(position + 1, begin))}
    if begin < NOWHERE:
        places |= {begin + x: begin + depth[x] for x in np.flatnonzero(line[node])}
    left, chunk = given.get("window", (None,))[0], given.get("chunk")
    near = {slot: at for slot, at in places.items() if left is None or position - at <= left}
    return [slot for slot, at in near.items() if chunk is None or at // chunk == position // chunk]


def softmaxed(q, keys, values, soft_cap, sinks):
    out = np.zeros_like(q)
    for head in range(len(q)):
        logits = SCALE * keys[:, head // RATIO] @ q[head]
        logits = logits if soft_cap is None else soft_cap * np.tanh(logits / soft_cap)
        weights = np.exp(logits)
        extra = 0.0 if sinks is None else np.exp(sinks[head])
        out[head] = weights @ values[:, head // RATIO] / (weights.sum() + extra)
    return out


def attended(option, dtype, implementation, monkeypatch):
    """By an implementation of `paged_attention`, or in the plain form; and what is expected."""
    if implementation != "plain":
        by = functools.partial(paged.attend_by_kernel, implementation=implementation)
        monkeypatch.setattr(cache, "attend_by_kernel", by)
    given, options, expected = drawn(option)
    *arrays, layer = jax.tree.map(lambda x: jnp.asarray(x, dtype), given[:3]) + given[3:]
    found = jax.jit(lambda *given: attend_cache(*given, layer, **options)[0])(*arrays)
    return np.asarray(jax.block_until_ready(found), np.float64), expected


@pytest.mark.catches("trees-in-a-line")
@pytest.mark.catches("trees-by-slot")
@pytest.mark.catches("trees-out-of-the-window")
@pytest.mark.parametrize("implementation", ["plain", "xla"])
@pytest.mark.parametrize("option", OPTIONS)
def test_a_token_sees_its_own_line(option, implementation, monkeypatch):
    found, expected = attended(option, jnp.float32, implementation, monkeypatch)
    there = ~np.isnan(expected)
    assert not found[~there].any()
    np.testing.assert_allclose(found[there], expected[there], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "option",
    [o if o == "window" else pytest.param(o, marks=pytest.mark.sweep) for o in OPTIONS],
)
def test_the_kernel_shows_the_same(option, monkeypatch):
    found, expected = attended(option, jnp.bfloat16, "interpret", monkeypatch)
    assert no_races("interpret")
    there = ~np.isnan(expected)
    assert not found[~there].any()
    error = np.linalg.norm(found[there] - expected[there])
    assert error <= 6e-3 * np.linalg.norm(expected[there])


def traced(nodes):
    """What `attend_cache` of a tree is made of, for a Hopper that is not there."""
    shape = jax.ShapeDtypeStruct((1, 8, PAGE, KV_HEADS, H), jnp.bfloat16)
    one, two = jnp.zeros(1, jnp.int32), jnp.zeros(2, jnp.int32)
    branches = Branches(
        begin=two,
        depth=jnp.zeros((2, nodes), jnp.int32),
        line=jnp.zeros((1, -(-nodes // 32)), jnp.uint32),
    )
    pages = Pages(table=jnp.zeros((2, 4), jnp.int32), groups=one[None], branches=branches)

    def step(q, held):
        new = {"k": q[:, :2], "v": q[:, :2]}
        return attend_cache(q, new, held, 0, seat=one, position=one, slot=one, pages=pages)

    q = jax.ShapeDtypeStruct((1, 4, H), jnp.bfloat16)
    with target("gpu", compute_capability=(9, 0)):
        return str(jax.jit(step).trace(q, {"k": shape, "v": shape}).jaxpr)


@pytest.mark.catches("trees-by-the-plain-form")
@pytest.mark.catches("trees-by-what-was-not-proved")
def test_trees_ask_for_a_kernel_of_their_own(monkeypatch):
    """One that knows words, proved as such; none where a tree has more nodes than these bits."""
    asked, choose = [], paged.choose

    def chosen(spec, *given):
        asked.append(spec)
        return choose(spec, *given)

    monkeypatch.setattr(paged, "choose", chosen)
    assert "wgmma" in traced(64)
    assert "wgmma" not in traced(65)
    assert [one.variant.words for one in asked] == [True, True]
    assert asked[0].more == () and asked[0].variant in set(variants())
    with pytest.raises(NotImplementedError, match="a tree of 65 tokens, more than 64, is not avai"):
        with target("gpu", compute_capability=(9, 0)):
            choose(asked[1], paged.current_target(), "mosaic")
