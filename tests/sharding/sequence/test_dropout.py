"""What attention drops is the same on any devices that share a row, its heads or its batch."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from colossax.pallas.attention import Mask, PairDropout
from tests.cases import quick_first
from tests.sharding.sequence.support import Layout, assert_close, operands, results, truth

HEADS, S = 4, 24
LAYOUTS = [
    Layout(ring=2, ulysses=2, tensor=2),
    Layout(ulysses=4),
    Layout(ring=4, order="natural"),
    Layout(ring=4, scheme="zigzag"),
    Layout(ring=2, outer=2),
    Layout(ring=2, scheme="all_gather"),
    Layout(ring=2, scheme="self_attention"),
    Layout(ring=2, scheme="self_attention", order="natural"),
]


def segments():
    return jnp.asarray(np.repeat([0, 1, -1], [17, 6, 1]))[None]


MASKS = {
    "causal": lambda: Mask(causal=True),
    "documents": lambda: Mask(causal=True, q_segments=segments(), kv_segments=segments()),
    "window": lambda: Mask(causal=True, window=(7, 0)),
    "both sides": lambda: Mask(),
    "positions": lambda: Mask(
        q_positions=jnp.arange(S)[None] * 3, kv_positions=jnp.arange(S)[None] // 2
    ),
}
CASES = [
    (layout, mask)
    for layout in LAYOUTS
    for mask in MASKS
    if not (layout.scheme == "zigzag" and mask in ("both sides", "positions"))
]
QUICK = [(LAYOUTS[0], "documents"), (LAYOUTS[2], "both sides"), (LAYOUTS[6], "positions")]
MARKS = {
    QUICK[0]: pytest.mark.catches("dropout-of-own-heads"),
    QUICK[1]: pytest.mark.catches("dropout-of-own-places"),
}


@pytest.mark.parametrize(("layout", "mask"), quick_first(CASES, QUICK, MARKS), ids=str)
def test_every_scheme_drops_the_same_with_its_gradient(layout, mask):
    given = MASKS[mask]()
    dropout = PairDropout.of(0.4, jnp.array([5, 77], jnp.uint32), HEADS)
    arrays = operands(heads=HEADS, b=2, s=S, sinks=True, slopes=True)

    def dropping(attend):
        return functools.partial(attend, dropout=dropout)

    found = results(dropping(layout), *arrays, mask=given)
    assert_close(found, results(dropping(truth), *arrays, mask=given))
    without = results(truth, *arrays, mask=given)
    assert np.abs(found["out"] - without["out"]).max() > 0.1
