"""Every scheme under a plan gives the values and all gradients of attention on one device."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.pallas.attention import Mask
from tests.cases import quick_first
from tests.sharding.sequence.support import Layout, assert_close, operands, results, truth

CAUSAL = Mask(causal=True)
WINDOW = Mask(causal=True, window=(11, 0))
WIDE = Mask(window=(20, None))
SCHEMES = ("ring", "all_gather", "self_attention")


def check(layout, arrays, mask=CAUSAL, **options):
    found = results(layout, *arrays, mask=mask, **options)
    assert_close(found, results(truth, *arrays, mask=mask, **options))


@functools.cache
def plain(mask=CAUSAL, options=(), **sizes):
    """Operands of these sizes, and what one device makes of them."""
    arrays = operands(**sizes)
    return arrays, results(truth, *arrays, mask=mask, **dict(options))


def check_sizes(layout, mask=CAUSAL, options=(), **sizes):
    """`check` of layouts that share their operands and the truth."""
    arrays, wanted = plain(mask, options, **sizes)
    assert_close(results(layout, *arrays, mask=mask, **dict(options)), wanted)


@pytest.mark.parametrize(
    ("ring", "ulysses", "tensor", "kv_heads"),
    [
        (8, 1, 1, 8),
        (8, 1, 1, 2),
        (1, 8, 1, 8),
        (1, 8, 1, 2),
        (2, 4, 1, 2),
        (4, 2, 1, 1),
        (2, 2, 2, 4),
        (4, 1, 2, 2),
        (1, 1, 1, 2),
    ],
)
def test_ring_and_ulysses(ring, ulysses, tensor, kv_heads):
    layout = Layout(ring=ring, ulysses=ulysses, tensor=tensor)
    check_sizes(layout, kv_heads=kv_heads, slopes=True, sinks=True)


@pytest.mark.parametrize(("outer", "ring"), [(2, 4), (4, 2), (8, 1)])
def test_double_ring(outer, ring):
    check_sizes(Layout(outer=outer, ring=ring), kv_heads=1)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(outer=2, ring=2, order="natural"),
        Layout(outer=2, ring=2, ulysses=2, scheme="all_gather"),
        Layout(outer=2, ring=4, scheme="all_gather", order="natural"),
        Layout(outer=2, ring=2, tensor=2, scheme="self_attention"),
    ],
    ids=str,
)
def test_double_ring_of_other_kinds(layout):
    check_sizes(layout, WINDOW, slopes=True, sinks=True)


S = 48


def ids(b, length=S):
    found = np.sort(np.random.default_rng(0).integers(0, 4, (b, length)), axis=1)
    found[:, -5:] = -1
    return jnp.asarray(found, jnp.int32)


INDEX = jnp.arange(S, dtype=jnp.int32)[None]
MASKS = {
    "everything": Mask(),
    "causal": CAUSAL,
    "left window": Mask(causal=True, window=(7, 0)),
    "long window": Mask(causal=True, window=(20, None)),
    "both windows": Mask(window=(5, 9)),
    "right window": Mask(window=(None, 3)),
    "prefix": Mask(causal=True, prefix=jnp.asarray([13, 0], jnp.int32)),
    "prefix and window": Mask(causal=True, window=(4, 0), prefix=jnp.asarray([3, 30], jnp.int32)),
    "packed": Mask(causal=True, q_segments=ids(2), kv_segments=ids(2)),
    "packed, both ways": Mask(q_segments=ids(1), kv_segments=ids(1)),
    "packed in a window": Mask(
        causal=True, window=(9, 0), q_segments=ids(2), kv_segments=ids(2), kv_valid=INDEX % 7 > 0
    ),
    "positions": Mask(
        causal=True,
        q_positions=INDEX % 20,
        kv_positions=INDEX % 20,
        q_segments=INDEX // 20,
        kv_segments=INDEX // 20,
    ),
    "positions that fall": Mask(causal=True, q_positions=S - 1 - INDEX, kv_positions=S - 1 - INDEX),
    "query positions": Mask(causal=True, q_positions=5 + INDEX),
    "nothing for the first": Mask(causal=True, kv_valid=INDEX > 17),
}
LAYOUTS = (
    Layout(ring=4),
    Layout(ring=4, order="natural"),
    Layout(ring=4, scheme="all_gather"),
    Layout(ring=4, scheme="self_attention"),
    Layout(ring=2, ulysses=2, tensor=2, scheme="auto", order="natural"),
)
# Each mask in one layout, and of the sweep in two others.
TURNS = [[(LAYOUTS[(i + n) % 5], name) for i, name in enumerate(MASKS)] for n in range(3)]


@functools.cache
def true_results(name):
    return results(truth, *of_masks(name), mask=MASKS[name])


def of_masks(name):
    return operands(s=S, h=2, slopes=name in ("both windows", "packed in a window", "positions"))


@pytest.mark.catches("ring-mask-of-another-step")
@pytest.mark.parametrize(
    ("layout", "name"), quick_first(itertools.chain(*TURNS), TURNS[0]), ids=str
)
def test_masks(layout, name):
    assert_close(results(layout, *of_masks(name), mask=MASKS[name]), true_results(name))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_cross_attention_with_another_head_size(scheme):
    layout = Layout(ring=2, ulysses=2, tensor=2, scheme=scheme)
    check_sizes(layout, WIDE, s=32, t=48, hv=6, kv_heads=4)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_soft_cap(scheme):
    check_sizes(Layout(ring=2, scheme=scheme), options=(("soft_cap", 1.5),))


@pytest.mark.parametrize("scheme", ["ring", "all_gather"])
def test_bfloat16_travels_and_is_merged_in_float32(scheme):
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), operands())
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), narrow)
    found = results(Layout(ring=4, scheme=scheme), *narrow, mask=CAUSAL)
    assert [found[x].dtype for x in ("out", "lse")] == [jnp.bfloat16, jnp.float32]
    assert {x.dtype for x in jax.tree.leaves(found["gradients"])} == {jnp.dtype(jnp.bfloat16)}
    assert_close(found, results(truth, *wide, mask=CAUSAL), tolerance=2e-2)


def odd_combination(seed):
    """One of many: sizes that divide eight devices, any mask with any scheme."""
    pick = np.random.default_rng(seed)
    sizes = itertools.product((1, 2, 4), (1, 2, 4), (1, 2), (1, 2))
    outer, ring, ulysses, tensor = pick.choice([x for x in sizes if 2 <= np.prod(x) <= 8])
    layout = Layout(
        outer=int(outer),
        ring=int(ring),
        ulysses=int(ulysses),
        tensor=int(tensor),
        scheme=str(pick.choice(["ring", *SCHEMES])),
        order=str(pick.choice(["zigzag", "zigzag", "natural"])),
    )
    arrays = operands(
        heads=8,
        kv_heads=int(pick.choice([x for x in (1, 2, 4, 8) if x % tensor == 0])),
        s=S,
        hv=int(pick.choice([2, 5])),
        h=2,
        slopes=bool(pick.integers(2)),
        sinks=bool(pick.integers(2)),
    )
    return layout, arrays, MASKS[str(pick.choice(list(MASKS)))]


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(n, marks=pytest.mark.sweep) for n in range(2, 24))]
)
def test_odd_combinations(seed):
    layout, arrays, mask = odd_combination(seed)
    check(layout, arrays, mask)
