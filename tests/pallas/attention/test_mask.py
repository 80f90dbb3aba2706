"""Masks: the dense truth against loops, ranges against the dense truth."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colossax.pallas.attention import Mask, dense, row_ranges, why_no_ranges


def by_loops(mask: Mask, batch: int, s: int, t: int) -> np.ndarray:
    """The definition, pair by pair."""

    def at(x, row, i, otherwise):
        return otherwise if x is None else np.asarray(x)[min(row, len(x) - 1), i]

    def sees(row, i, j):
        q, kv = at(mask.q_positions, row, i, i), at(mask.kv_positions, row, j, j)
        left, right = mask.window or (None, None)
        near = (left is None or kv >= q - left) and (right is None or kv <= q + right)
        ordered = near and (kv <= q or not mask.causal)
        if mask.prefix is not None:
            ordered |= kv < np.asarray(mask.prefix)[min(row, len(mask.prefix) - 1)]
        mine, other = at(mask.q_segments, row, i, 0), at(mask.kv_segments, row, j, 0)
        return bool(ordered and mine == other and mine >= 0 and at(mask.kv_valid, row, j, True))

    return np.array([[[[sees(r, i, j) for j in range(t)] for i in range(s)]] for r in range(batch)])


def packed_row(rng: np.random.Generator, length: int, padding: bool) -> tuple[list, list]:
    """Segments and positions of documents of random lengths, padding at random places between."""
    segments, positions, document = [], [], 0
    while len(segments) < length:
        size = int(rng.integers(1, max(2, length // 2)))
        pad = padding and rng.random() < 0.3
        segments += [-1 if pad else document] * size
        # Ascending with gaps, as when a sequence is dealt out to devices in pieces.
        positions += list(np.cumsum(rng.integers(1, 3, size)) - 1)
        document += 0 if pad else int(rng.integers(1, 3))
    return segments[:length], positions[:length]


@st.composite
def masks(draw, ranges: bool):
    """A mask with any of its parts, and sizes; `ranges` leaves out what is none."""
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    # Few shapes: each new one compiles every operation again.
    batch, s, t = draw(st.sampled_from([(1, 7, 7), (2, 7, 7), (2, 10, 4), (2, 4, 10)]))
    fields = {"causal": draw(st.booleans())}
    if draw(st.booleans()):
        side = st.one_of(st.none(), st.integers(0, 5))
        fields["window"] = (draw(side), draw(side))
    if draw(st.booleans()):
        rows = [[packed_row(rng, n, True) for n in (s, t)] for _ in range(batch)]
        if s == t and draw(st.booleans()):
            rows = [[q, q] for q, _ in rows]
        for i, side_name in enumerate(("q", "kv")):
            fields[f"{side_name}_segments"] = jnp.asarray([r[i][0] for r in rows], jnp.int32)
            if draw(st.booleans()):
                fields[f"{side_name}_positions"] = jnp.asarray([r[i][1] for r in rows], jnp.int32)
    elif draw(st.booleans()):
        for name, n in (("q_positions", s), ("kv_positions", t)):
            found = np.sort(rng.integers(0, 15, (draw(st.sampled_from([1, batch])), n)), axis=1)
            fields[name] = jnp.asarray(found, jnp.int32)
    window = fields.get("window") or (None, None)
    if draw(st.booleans()) and not (ranges and window[0] is not None):
        fields["prefix"] = jnp.asarray(rng.integers(0, 8, batch), jnp.int32)
    if not ranges and draw(st.booleans()):
        fields["kv_valid"] = jnp.asarray(rng.random((batch, t)) < 0.7)
    return Mask(**fields), batch, s, t


@pytest.mark.sentinel
@pytest.mark.catches("mask-padding-sees")
@settings(max_examples=60)
@given(masks(ranges=False))
def test_dense_is_the_definition(case):
    mask, batch, s, t = case
    found = np.broadcast_to(dense(mask, s, t), (batch, 1, s, t))
    np.testing.assert_array_equal(found, by_loops(mask, batch, s, t))


@pytest.mark.sentinel
@pytest.mark.catches("mask-range-end")
@settings(max_examples=120)
@given(masks(ranges=True))
def test_ranges_are_the_dense_mask(case):
    mask, _, s, t = case
    assert why_no_ranges(mask) is None
    lo, hi = (np.asarray(x) for x in row_ranges(mask, s, t))
    keys = np.arange(t)
    ranges = (lo[..., None] <= keys) & (keys < hi[..., None])
    expected = np.asarray(dense(mask, s, t))[:, 0]
    np.testing.assert_array_equal(*np.broadcast_arrays(ranges, expected))
    assert lo.min() >= 0 and hi.max() <= t and (lo <= hi).all()


def test_ranges_never_fall_along_a_packed_row():
    rng = np.random.default_rng(1)
    for _ in range(20):
        segments, positions = packed_row(rng, 24, padding=True)
        tokens = {
            name: jnp.asarray([x], jnp.int32)
            for name, x in (
                ("q_segments", segments),
                ("kv_segments", segments),
                ("q_positions", positions),
                ("kv_positions", positions),
            )
        }
        lo, hi = row_ranges(Mask(causal=True, window=(3, 0), **tokens), 24, 24)
        assert (jnp.diff(lo) >= 0).all() and (jnp.diff(hi) >= 0).all()


def test_positions_restart_in_each_document():
    segments = jnp.asarray([[0, 0, 0, 1, 1, -1]])
    positions = jnp.asarray([[0, 1, 2, 0, 1, 0]])
    mask = Mask(
        causal=True,
        q_positions=positions,
        kv_positions=positions,
        q_segments=segments,
        kv_segments=segments,
    )
    lo, hi = row_ranges(mask, 6, 6)
    assert lo.tolist() == [[0, 0, 0, 3, 3, 5]]
    assert hi.tolist() == [[1, 2, 3, 4, 5, 5]]


@pytest.mark.catches("mask-window-left")
def test_a_window_counts_the_query_itself():
    """A sliding window of 3 keys is (2, 0): the query and the two before it."""
    seen = dense(Mask(causal=True, window=(2, 0)), 6, 6)[0, 0]
    assert seen.sum(axis=1).tolist() == [1, 2, 3, 3, 3, 3]
    assert np.nonzero(np.asarray(seen[5]))[0].tolist() == [3, 4, 5]


def test_a_prefix_is_seen_by_all_of_the_row():
    mask = Mask(causal=True, prefix=jnp.asarray([0, 2]))
    seen = dense(mask, 4, 4)[:, 0]
    assert seen.sum(axis=-1).tolist() == [[1, 2, 3, 4], [2, 2, 3, 4]]


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({"kv_valid": jnp.ones((1, 4), bool)}, "kv_valid may have holes"),
        ({"prefix": jnp.asarray([2]), "window": (1, 0)}, "a prefix and a window"),
    ],
)
def test_what_is_no_range_says_why(fields, reason):
    with pytest.raises(NotImplementedError, match=reason):
        row_ranges(Mask(causal=True, **fields), 4, 4)


def test_bad_masks_are_refused():
    with pytest.raises(ValueError, match=r"window \(-1, 0\) is negative"):
        Mask(window=(-1, 0))
    with pytest.raises(ValueError, match="has q_segments but no kv_segments"):
        Mask(q_segments=jnp.zeros((1, 4), int))


def test_a_mask_is_a_pytree_with_static_parts():
    mask = Mask(
        causal=True, window=(3, 0), q_segments=jnp.zeros((2, 4)), kv_segments=jnp.ones((2, 4))
    )
    leaves, tree = jax.tree.flatten(mask)
    assert len(leaves) == 2
    assert jax.tree.unflatten(tree, ["a", "b"]).q_segments == "a"
    traces = []

    @jax.jit
    def under_jit(mask):
        traces.append(mask.window)
        return mask.q_segments

    for window in ((3, 0), (4, 0), (3, 0)):
        under_jit(Mask(causal=True, window=window, q_segments=leaves[0], kv_segments=leaves[1]))
    assert traces == [(3, 0), (4, 0)]
