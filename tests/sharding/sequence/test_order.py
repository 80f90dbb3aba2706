"""Who holds which token, and whose tokens anybody sees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colossax.pallas.attention import Mask
from colossax.sharding.sequence import Order, inverse_order, positions_local, zigzag_order
from colossax.sharding.sequence.order import check_order, offsets_seen


@pytest.mark.catches("zigzag-mirror")
def test_a_rank_holds_a_chunk_and_its_mirror_image():
    assert zigzag_order(12, 3).tolist() == [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]


def places(order, length, ranks):
    return zigzag_order(length, ranks) if order == "zigzag" else np.arange(length)


@given(st.integers(1, 9), st.integers(1, 6))
def test_the_inverse_undoes_it(ranks, chunk):
    order = zigzag_order(2 * ranks * chunk, ranks)
    tokens = np.random.default_rng(0).normal(size=len(order))
    np.testing.assert_array_equal(tokens[order][inverse_order(order)], tokens)


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_positions_are_the_natural_indices(order, ranks):
    of_rank = jax.vmap(lambda r: positions_local(r, length=6, ranks=ranks, order=order))
    found = of_rank(jnp.arange(ranks)).reshape(-1)
    np.testing.assert_array_equal(found, places(order, 6 * ranks, ranks))


def offsets_of_the_dense_mask(mask, s, t, ranks, order):
    q, kv = np.arange(s * ranks)[:, None], np.arange(t * ranks)
    seen = np.ones((s * ranks, t * ranks), bool)
    if mask.right is not None:
        seen &= kv <= q + mask.right
    if mask.left is not None:
        seen &= kv >= q - mask.left
    seen = seen[places(order, s * ranks, ranks)][:, places(order, t * ranks, ranks)]
    rank, source = np.nonzero(seen.reshape(ranks, s, ranks, t).any(axis=(1, 3)))
    return sorted(set((rank - source) % ranks) - {0})


@pytest.mark.catches("window-one-short")
@settings(max_examples=400)
@given(
    causal=st.booleans(),
    left=st.none() | st.integers(0, 12),
    right=st.none() | st.integers(0, 12),
    ranks=st.integers(1, 7),
    s=st.integers(1, 3),
    t=st.integers(1, 3),
    order=st.sampled_from(Order),
)
def test_offsets_are_those_of_the_dense_mask(causal, left, right, ranks, s, t, order):
    mask = Mask(causal=causal, window=(left, right))
    wanted = offsets_of_the_dense_mask(mask, 2 * s, 2 * t, ranks, order)
    found = offsets_seen(mask, 2 * s, 2 * t, ranks, order)
    assert list(found) == wanted


@pytest.mark.parametrize("given_too", ["q_positions", "kv_positions", "prefix"])
def test_what_is_known_only_from_data_leaves_nothing_out(given_too):
    array = jnp.zeros((1,) if given_too == "prefix" else (1, 4), jnp.int32)
    mask = Mask(causal=True, window=(0, 0), **{given_too: array})
    assert offsets_seen(mask, 4, 4, 8, "zigzag") == tuple(range(1, 8))


def test_refusals():
    with pytest.raises(ValueError, match="20 tokens do not make 2 x 4 equal chunks; pad .* 8 with"):
        zigzag_order(20, 4)
    with pytest.raises(ValueError, match="5 tokens per rank are no two equal chunks; pad .* of 8"):
        check_order("zigzag", 5, 4)
    with pytest.raises(ValueError, match=r"order 'zig' is unknown; use one of \['contiguous', 'z"):
        check_order("zig", 4, 4)
