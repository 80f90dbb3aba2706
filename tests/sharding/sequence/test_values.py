"""Every scheme gives the values and all gradients of plain attention on one device."""

import jax.numpy as jnp
import numpy as np
import pytest

from colossax.pallas.attention import Mask
from tests.sharding.sequence.support import Layout, assert_close, operands, results, truth


def check(layout, arrays, mask=None):
    assert_close(results(layout, *arrays, mask=mask), results(truth, *arrays, mask=mask))


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
    arrays = operands(kv_heads=kv_heads, slopes=True, sinks=True)
    check(Layout(ring=ring, ulysses=ulysses, tensor=tensor), arrays)


@pytest.mark.parametrize(("outer", "ring"), [(2, 4), (4, 2), (8, 1), (1, 8)])
@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
def test_double_ring(outer, ring, order):
    check(Layout(outer=outer, ring=ring, order=order), operands(s=48, kv_heads=1))


def ids(b, length, seed=0):
    found = np.sort(np.random.default_rng(seed).integers(0, 4, (b, length)), axis=1)
    found[:, -5:] = -1
    return jnp.asarray(found, jnp.int32)


S = 48
MASKS = {
    "everything": Mask(),
    "causal": Mask(causal=True),
    "left window": Mask(causal=True, window=(7, 0)),
    "long window": Mask(causal=True, window=(20, None)),
    "both windows": Mask(window=(5, 9)),
    "right window": Mask(window=(None, 3)),
    "prefix": Mask(causal=True, prefix=jnp.asarray([13, 0], jnp.int32)),
    "prefix in a window": Mask(causal=True, window=(4, 0), prefix=jnp.asarray([3, 30], jnp.int32)),
    "packed": Mask(causal=True, q_segments=ids(2, S), kv_segments=ids(2, S)),
    "packed, both ways": Mask(q_segments=ids(1, S), kv_segments=ids(1, S)),
    "packed in a window": Mask(
        causal=True, window=(9, 0), q_segments=ids(2, S), kv_segments=ids(2, S)
    ),
    "positions": Mask(
        causal=True,
        q_positions=jnp.arange(S, dtype=jnp.int32)[None] % 20,
        kv_positions=jnp.arange(S, dtype=jnp.int32)[None] % 20,
    ),
    "query positions": Mask(causal=True, q_positions=5 + jnp.arange(S, dtype=jnp.int32)[None]),
    "holes": Mask(causal=True, kv_valid=jnp.arange(S)[None] % 3 > 0),
    "nothing for the first": Mask(causal=True, kv_valid=jnp.arange(S)[None] > 17),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(ring=4, ulysses=2),
        Layout(ring=4, ulysses=2, order="contiguous"),
        Layout(ring=8, scheme="gather"),
        Layout(ring=4, scheme="rsa", ulysses=2),
    ],
    ids=str,
)
def test_masks(layout, name):
    check(layout, operands(s=S, slopes=name in ("causal", "positions")), MASKS[name])
